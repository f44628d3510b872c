"""Runs the demo: trains, saves, restores in new processes on other meshes and in stock PyTorch, and compares.

Started by ``scripts/demo``. Each stage is a process of its own, one at a time; this one only reads what they print
and leave behind. Exits with 1 if a process fails or anything disagrees. It may be stopped or killed at any time: run
again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from demo_draw import draw_boxes, draw_losses, pretty
from demo_table import contents
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

SCRIPTS = Path(__file__).parent
OUTPUT = SCRIPTS.parent / "demo_output"
RUN = OUTPUT / "run"
LOGS = OUTPUT / "logs"

STEPS, SAVE_AT = 48, 24
CHECKPOINT = RUN / str(SAVE_AT)
FINISHED, LOCK = OUTPUT / "finished", OUTPUT / "lock"
SAVED_ON = "4x2"
RESUMED_ON = ("2x4", "8x1")
# Meshes add up in different orders, so losses agree to rounding: below 1e-6 was seen. A run that has lost the state of
# one random generator is off by 3e-3 or more.
TOLERANCE = 1e-4  # nats per byte

DEVICES = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "8",
    "TF_CPP_MIN_LOG_LEVEL": "3",  # the partitioner's notes
    # Where both cores are busy, torch's threads wait for each other at every small copy: loading took 20 s, not 0.7.
    "OMP_NUM_THREADS": "1",
}
# DCP says these whenever it runs in one process.
QUIET = {"PYTHONWARNINGS": "ignore:TypedStorage is deprecated,ignore:torch.distributed is disabled"}

Event = dict[str, Any]
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@dataclass(frozen=True)
class Run:
    """What a training process left behind.

    Args:
        mesh: its name, for example "4x2".
        losses: by step, counted from 0.
        digests: of every item of the state, at the checkpoint.
        layouts: of every tensor of the state, at the checkpoint.
    """

    mesh: str
    losses: Mapping[int, float]
    digests: Mapping[str, str]
    layouts: Mapping[str, Any]


@dataclass(frozen=True)
class Check:
    """A claim of the demo, and how it came out."""

    claim: str
    found: str
    passed: bool


def train(mesh: str, title: str, *extra: str) -> Run:
    """Run a training process to the end."""
    report, losses = LOGS / f"state-{mesh}.json", LOGS / f"losses-{mesh}.jsonl"
    if "--from-step" in extra:
        losses.unlink(missing_ok=True)
    paths = ["--run", str(RUN), "--report", str(report), "--losses", str(losses)]
    command = [sys.executable, str(SCRIPTS / "demo_train.py"), "--mesh", mesh, "--steps", str(STEPS), *paths, *extra]
    steps = STEPS - SAVE_AT if "--from-step" in extra else STEPS
    follow(command, {**os.environ, **DEVICES, **QUIET}, f"train-{mesh}", title, steps)
    return Run(mesh, losses_of(losses), **json.loads(report.read_text(encoding="utf-8")))


def losses_of(path: Path) -> dict[int, float]:
    """The losses that processes wrote down; steps that were taken again count once, and a line may be cut off."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            event = json.loads(line)
            found[event["step"]] = event["loss"]
    return found


def open_plainly(python: str) -> Event:
    """Open the checkpoint in a Python that has no torch_xla, and none of this package."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, str(SCRIPTS / "demo_plain.py"), str(CHECKPOINT)]
    (opened,) = follow(command, {**environment, **QUIET}, "plain", "stock PyTorch", 0)
    return opened


def follow(command: Sequence[str], environment: Mapping[str, str], name: str, title: str, steps: int) -> list[Event]:
    """Run a process, showing its progress; returns the events it printed.

    Raises:
        SystemExit: it failed. What it wrote to stderr is shown.
    """
    events: list[Event] = []
    log = LOGS / f"{name}.stderr"
    with log.open("w") as stderr, progress_bar() as bar:
        task = bar.add_task(title, total=steps, visible=steps > 0)
        # The lock goes with the process: should this one be killed, another demo waits until that has noticed.
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, pass_fds=[lock_of_output()]
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    console.print(line.rstrip(), style="dim", markup=False)
                    continue
                events.append(json.loads(line))
                say(events[-1])
                if "loss" in events[-1]:
                    done = events[-1]["step"] + 1 - (STEPS - steps)
                    bar.update(task, completed=done, description=f"{title}: loss {events[-1]['loss']:.3f}")
            failed = process.wait()
        except KeyboardInterrupt:
            process.terminate()  # it saves the step it is at
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
            raise SystemExit("\nstopped; run it again to go on") from None
        finally:
            process.kill()
    said = log.read_text()
    if said.strip():
        console.print(said.rstrip(), style="red" if failed else "dim", markup=False)
    if failed:
        console.print(f"[red]{name} failed with exit status {failed}[/]")
        raise SystemExit(1)
    return events


@cache
def lock_of_output() -> int:
    """The file that a demo locks as long as it or a process of it uses the outputs."""
    return os.open(LOCK, os.O_CREAT | os.O_RDWR)


def progress_bar() -> Progress:
    """A bar on a terminal; elsewhere nothing, and ``say`` prints some steps instead."""
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def say(event: Event) -> None:
    """Print what a process reports, as far as people want to know it."""
    match event:
        case {"event": "built"}:
            console.print(f"  {event['parameters']:,} parameters, {event['corpus']:,} bytes of text; compiling")
        case {"event": "saving"}:
            note = " (it compiled the copy's graph)" if event["step"] < SAVE_AT / 2 else ""
            blocked = f"the loop was blocked for {event['seconds'] * 1e3:.0f} ms{note}"
            console.print(f"  step {event['step']} is saved in the background; {blocked}")
        case {"event": "restored"}:
            console.print(f"  restored step {event['step']} in {event['seconds']:.1f} s, and goes on")
        case {"event": "history"}:
            console.print(event["table"], markup=False)
        case {"event": "step"} if not console.is_terminal and event["step"] % 8 == 7:
            console.print(f"  step {event['step'] + 1} of {STEPS}: loss {event['loss']:.3f}")


def check_exact(claim: str, saved: Mapping[str, str], found: Mapping[str, str], note: str = "") -> Check:
    different = sorted(key for key in saved.keys() | found.keys() if saved.get(key) != found.get(key))
    if different:
        return Check(claim, f"{len(different)} of {len(saved)} items differ: {', '.join(different[:5])}", False)
    return Check(claim, f"all {len(saved)} items bit-exact{note}", True)


def check_losses(full: Run, resumed: Run) -> Check:
    claim = f"resumed on {pretty(resumed.mesh)}, follows the uninterrupted run"
    if sorted(resumed.losses) != list(range(SAVE_AT, STEPS)):
        return Check(claim, f"it did not make the steps {SAVE_AT} to {STEPS - 1}", False)
    apart = [abs(loss - full.losses[step]) for step, loss in resumed.losses.items()]
    found = f"{len(apart)} losses, largest difference {max(apart):.1e} (allowed: {TOLERANCE:.0e})"
    return Check(claim, found, all(difference <= TOLERANCE for difference in apart))


def check_learning(run: Run) -> Check:
    first, last = run.losses[0], sum(run.losses[step] for step in range(STEPS - 8, STEPS)) / 8
    return Check("the model learns", f"loss {first:.2f} at first, {last:.2f} over the last 8 steps", last < first - 1)


def moved(saved: Run, resumed: Run) -> str:
    """How many tensors lie in other boxes than when they were saved."""
    tiled = [key for key, layout in saved.layouts.items() if len(layout["shards"]) > 1]
    other = sum(saved.layouts[key]["shards"] != resumed.layouts[key]["shards"] for key in tiled)
    return f"; {other} of {len(tiled)} tensors in other boxes"


def check_all(full: Run, resumed: Sequence[Run], plain: Event) -> list[Check]:
    exact = [
        check_exact(
            f"restored on {pretty(run.mesh)} into a meta-device model, read from the devices",
            full.digests,
            run.digests,
            moved(full, run),
        )
        for run in resumed
    ]
    opened = check_exact(f"opened by stock torch {plain['torch']}", full.digests, plain["digests"])
    return [*exact, opened, *(check_losses(full, run) for run in resumed), check_learning(full)]


def conclude(checks: Sequence[Check], seconds: float) -> int:
    """Print the outcome; returns the exit status."""
    table = Table(title="What was shown", title_justify="left", show_header=False, box=SIMPLE)
    for check in checks:
        table.add_row("[green]yes[/]" if check.passed else "[red]NO[/]", check.claim, check.found)
    console.print(table)
    console.print(f"Took {seconds:.0f} s. Outputs in {OUTPUT}:")
    for name, what in (
        ("loss.png", "the three loss curves, and how far they are apart"),
        ("boxes.png", "two tensors' boxes on the three meshes"),
        ("losses.json", "the losses"),
        ("run/", "the steps that were kept; each opens with torch_xla_ckpt.load, and with stock PyTorch"),
        ("logs/", "digests and layouts of the state in each process, and what they wrote to stderr"),
    ):
        console.print(f"  {name:12} {what}")
    return 0 if all(check.passed for check in checks) else 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain-python", required=True, help="a Python with torch and without torch_xla")
    plain_python = parser.parse_args().plain_python
    begun = time.perf_counter()
    OUTPUT.mkdir(exist_ok=True)
    fcntl.flock(lock_of_output(), fcntl.LOCK_EX)
    if FINISHED.exists():
        for path in (FINISHED, *OUTPUT.glob("*.png"), *OUTPUT.glob("*.json")):
            path.unlink(missing_ok=True)
        shutil.rmtree(RUN, ignore_errors=True)
        shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(exist_ok=True)

    console.print("[bold]1. A Llama learns bytes on eight devices, fsdp x tensor = 4 x 2, and saves while it learns")
    full = train(SAVED_ON, "uninterrupted", "--compare-at", str(SAVE_AT))
    console.print(contents(CHECKPOINT, full.layouts))
    resumed = []
    for number, mesh in enumerate(RESUMED_ON, 2):
        console.print(f"[bold]{number}. A new process restores it on {pretty(mesh)} and goes on")
        resumed.append(train(mesh, "resumed", "--from-step", str(SAVE_AT)))
    console.print(f"[bold]{len(RESUMED_ON) + 2}. A process without torch_xla opens it with stock PyTorch")
    plain = open_plainly(plain_python)

    runs = [full, *resumed]
    losses = {run.mesh: {step + 1: loss for step, loss in run.losses.items()} for run in runs}
    (OUTPUT / "losses.json").write_text(json.dumps(losses, indent=1), encoding="utf-8")
    draw_losses(losses, SAVE_AT, TOLERANCE, OUTPUT / "loss.png")
    draw_boxes({run.mesh: run.layouts for run in runs}, OUTPUT / "boxes.png")
    FINISHED.touch()
    return conclude(check_all(full, resumed, plain), time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())

"""The demo: one process trains and saves, others restore the checkpoint on other meshes and in stock PyTorch.

Started by ``scripts/demo``. All processes start at the same time; those that restore wait for the commit. This process
prints what they report, compares their results and draws the pictures. The exit status is 1 if a process fails or a
claim does not hold. The demo may be stopped or killed at any time: run it again, and it goes on.
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
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from demo_parts.checks import TOLERANCE, Check, Run, check_all
from demo_parts.pictures import draw_boxes, draw_losses, pretty
from demo_parts.processes import Processes, Program, console, lock_of
from demo_parts.table import contents

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "demo_output"
RUN = OUTPUT / "run"
LOGS = OUTPUT / "logs"

STEPS, SAVE_AT = 48, 24
CHECKPOINT = RUN / str(SAVE_AT)
FINISHED, LOCK = OUTPUT / "finished", OUTPUT / "lock"
SAVED_ON = "4x2"
RESUMED_ON = ("2x4", "8x1")

DEVICES = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "8",
    "TF_CPP_MIN_LOG_LEVEL": "3",  # hides the notes of XLA's partitioner
    # While both cores are busy, torch's threads wait for each other at every small copy: loading took 20 s, not 0.7 s.
    "OMP_NUM_THREADS": "1",
}
# DCP logs these warnings whenever it runs in one process.
QUIET = {"PYTHONWARNINGS": "ignore:TypedStorage is deprecated,ignore:torch.distributed is disabled"}


def training(mesh: str) -> Program:
    """Return the process that trains on the first mesh, or goes on from the checkpoint on another mesh."""
    report, losses = files_of(mesh)
    paths = ["--run", str(RUN), "--report", str(report), "--losses", str(losses)]
    command = [sys.executable, "-m", "demo_parts.train", "--mesh", mesh, "--steps", str(STEPS), *paths]
    environment = {**os.environ, **DEVICES, **QUIET}
    log = LOGS / f"train-{mesh}.stderr"
    if mesh == SAVED_ON:
        command += ["--compare-at", str(SAVE_AT)]
        return Program(f"{pretty(mesh)}, uninterrupted", command, environment, log, STEPS)
    losses.unlink(missing_ok=True)
    command += ["--from-step", str(SAVE_AT)]
    return Program(f"{pretty(mesh)}, resumed", command, environment, log, STEPS - SAVE_AT, SAVE_AT)


def files_of(mesh: str) -> tuple[Path, Path]:
    """Return the files for the state's digests and layouts, and for the losses."""
    return LOGS / f"state-{mesh}.json", LOGS / f"losses-{mesh}.jsonl"


def plain(python: str) -> Program:
    """Return the process that opens the checkpoint in a Python that has neither torch_xla nor this package."""
    # Of the checkout, this process can import the parts of the demo, and not the package.
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT / "scripts")}
    command = [python, "-m", "demo_parts.plain", str(CHECKPOINT)]
    return Program("stock PyTorch", command, environment, LOGS / "plain.stderr")


def conclude(checks: Sequence[Check], seconds: float) -> int:
    """Print the outcome; return the exit status."""
    table = Table(title="What was shown", title_justify="left", show_header=False, box=SIMPLE)
    for check in checks:
        table.add_row("[green]yes[/]" if check.passed else "[red]NO[/]", check.claim, check.found)
    console.print(table)
    console.print(f"The demo took {seconds:.0f} s. Its files are in {OUTPUT}:")
    for name, what in (
        ("loss.png", "the three loss curves and their differences"),
        ("boxes.png", "the boxes of two tensors on the three meshes"),
        ("losses.json", "the losses"),
        ("run/", "the steps that were kept; torch_xla_ckpt.load and stock PyTorch open each of them"),
        ("logs/", "digests and layouts of the state in each process, and the processes' stderr"),
    ):
        console.print(f"  {name:12} {what}")
    return 0 if all(check.passed for check in checks) else 1


def ask() -> None:
    """Ask three questions about the run with the command line ``xc``, and print the answers."""
    run = os.path.relpath(RUN)
    for arguments in (["ls", run], ["ls", f"{run}/latest", "model.*"], ["verify", run]):
        console.print(f"[bold]$ xc {' '.join(arguments)}[/]")
        done = subprocess.run([sys.executable, "-m", "torch_xla_ckpt", *arguments], stdout=subprocess.PIPE, text=True)
        console.print(done.stdout if done.returncode == 0 else f"xc failed with status {done.returncode}", markup=False)


def prepare() -> int:
    """Lock the output folder and remove the files of a finished demo; return the lock's file descriptor."""
    OUTPUT.mkdir(exist_ok=True)
    lock = lock_of(LOCK)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if FINISHED.exists():
        for path in (FINISHED, *OUTPUT.glob("*.png"), *OUTPUT.glob("*.json")):
            path.unlink(missing_ok=True)
        shutil.rmtree(RUN, ignore_errors=True)
        shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(exist_ok=True)
    return lock


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain-python", required=True, help="a Python with torch and without torch_xla")
    plain_python = parser.parse_args().plain_python
    begun = time.perf_counter()
    lock = prepare()
    console.print(
        f"[bold]A Llama learns bytes on eight devices, fsdp x tensor = {pretty(SAVED_ON)}, and saves while it learns.\n"
        f"Two other processes restore step {SAVE_AT} on {' and '.join(map(pretty, RESUMED_ON))}, and go on.\n"
        "A fourth process, without torch_xla, opens the checkpoint with stock PyTorch.[/]"
    )
    meshes = (SAVED_ON, *RESUMED_ON)
    programs = {mesh: training(mesh) for mesh in meshes}
    events = Processes({**programs, "plain": plain(plain_python)}, lock).run()
    (opened,) = events["plain"]

    runs = [Run.read(mesh, losses, report) for mesh in meshes for report, losses in (files_of(mesh),)]
    full, *resumed = runs
    console.print(contents(CHECKPOINT, opened["items"], full.layouts))
    losses = {run.mesh: {step + 1: loss for step, loss in run.losses.items()} for run in runs}
    (OUTPUT / "losses.json").write_text(json.dumps(losses, indent=1), encoding="utf-8")
    draw_losses(losses, SAVE_AT, TOLERANCE, OUTPUT / "loss.png")
    draw_boxes({run.mesh: run.layouts for run in runs}, OUTPUT / "boxes.png")
    ask()
    FINISHED.touch()
    return conclude(check_all(full, resumed, opened, SAVE_AT, STEPS), time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())

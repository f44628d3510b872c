"""What an async save costs a training loop, beside torch_xla's ``CheckpointManager.save_async``.

Each measure is taken cold and warm. The first mode is ``SPMDStager()`` without options.

- Warm: the sides take turns in one process, on the same state, after a warm-up that compiles everything.
- Cold: each side runs in a new process that has never saved, on memory that the machine's host has taken back
  (``cold.py``).

No side calls fsync. Ours writes checksums. Each checkpoint of ours is compared bit for bit with the tensors on the
devices. The exit status is 0 if all results are right, whether or not the targets are reached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import torch_xla_ckpt as xc
from benchmarks.async_parts.pictures import draw
from benchmarks.async_parts.sides import MIB, MODES, Ours, Side, TorchXla, Training, compiled, settle
from benchmarks.sizes import size_of
from benchmarks.storage_parts.turns import WarmMemory, tidy
from torch_xla_ckpt.device import access_of
from torch_xla_ckpt.staging.capture import Capture

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@dataclass(frozen=True)
class Row:
    """One measure.

    Args:
        measure: the name of the measure.
        theirs, ours: torch_xla's value and ours, in ``unit``. Compare their ratio.
        target: the target in words.
        reached: True if the target was reached; None if there is none.
    """

    measure: str
    theirs: float | None
    ours: float
    unit: str
    target: str
    reached: bool | None


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def blocked(training: Training, sides: Sequence[Side], repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each call on idle devices, by side. Two more rounds compile and are not counted."""
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    warm = WarmMemory(training.nbytes())
    for number in range(repeat + 2):
        for side in sides:
            training.step()
            settle()
            tidy()
            state = training.state()
            warm.hold()
            warm.release()
            one = seconds(partial(side.save, number, state))
            side.finish()
            if isinstance(side, Ours):
                side.check(training)
            if number > 1:
                taken[side.name].append(one)
    return taken


def loop(training: Training, side: Side | None, steps: int, saves: int) -> float:
    """Return the seconds of a training loop with its saves, until the last save is written."""
    due = {(2 * n + 1) * steps // (2 * saves) for n in range(saves)}

    def run() -> None:
        for step in range(steps):
            training.step()
            if side is not None and step in due:
                side.save(step, training.state())
        settle()
        if side is not None:
            side.finish()

    settle()
    tidy()
    os.sync()
    return seconds(run)


def loops(
    training: Training, sides: Sequence[Side], steps: int, saves: int, repeat: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Return the seconds of loops without saves, and of loops with the saves of each side. The sides take turns."""
    alone: list[float] = []
    beside: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(repeat):
        # Reverse the order in every second round, so that a machine that slows down slows all sides alike.
        for side in [None, *sides] if number % 2 == 0 else [*reversed(sides), None]:
            taken = loop(training, side, steps, saves)
            (alone if side is None else beside[side.name]).append(taken)
    return alone, beside


def longest_hold(training: Training, repeat: int) -> list[float]:
    """Return, for each run, the longest time in seconds for which fetching a part stopped all other Python threads.

    The value is an upper bound: whatever else stops the watching thread counts too.
    """
    found = []
    warm = WarmMemory(256 * MIB)
    for number in range(repeat + 1):
        training.step()
        capture = Capture("device", None, 16 << 20, False, access_of)
        copied = capture.take(training.state(), lambda: None, xc.Timeline())
        settle()
        warm.hold()
        warm.release()
        gaps: list[float] = []
        started, ended = threading.Event(), threading.Event()

        def fetch(copied: Any = copied, started: threading.Event = started, ended: threading.Event = ended) -> None:
            layouts = [(t, access_of(t).layout(t)) for t in copied.snapshots]
            started.set()
            for snapshot, layout in layouts:
                for part in sorted(set(layout.parts.values())):
                    access_of(snapshot).fetch(snapshot, layout, part)
            ended.set()

        thread = threading.Thread(target=fetch)
        thread.start()
        started.wait()
        last = time.perf_counter()
        while not ended.is_set():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now
        thread.join()
        if number:
            found.append(max(gaps))
    return found


def memory(side: str, size: int, budget: int) -> int:
    """Return the host memory in bytes that an async save takes beside the state. Runs in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.async_parts.memory", side, folder]
        options = ["--size", str(size), "--budget", str(budget)]
        # Make glibc return freed blocks to the system, so that only memory in use is counted.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
        done = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE, text=True, env=environment)
        return int(done.stdout.split()[-1])


def cold(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the costs of a program's first saves. Runs in a new process."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        command = [sys.executable, "-m", "benchmarks.async_parts.cold", side, folder]
        sizes = ["--size", str(options.size), "--steps", str(options.steps), "--saves", str(options.saves)]
        done = subprocess.run([*command, *sizes], check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def cold_rows(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Return the cold rows and their raw numbers: each side runs in one new process a round."""
    raw: dict[str, list[dict[str, Any]]] = {name: [] for name in (TorchXla.name, *MODES)}
    for _ in range(options.loops):
        for name, found in raw.items():
            with console.status(f"cold: {name}"):
                found.append(cold(name, options))
    first = {name: statistics.median(one["calls"][0] for one in found) for name, found in raw.items()}
    later = {name: statistics.median(c for one in found for c in one["calls"][1:]) for name, found in raw.items()}
    added = {name: statistics.median(one["beside"] - one["alone"] for one in found) for name, found in raw.items()}
    rows = []
    for words, by_side in (
        ("cold: a program's first call blocks", first),
        ("cold: its later calls block", later),
        (f"cold: {options.saves} saves add to {options.steps} steps", added),
    ):
        rows += [compared(words, mode, by_side[TorchXla.name], by_side[mode]) for mode in MODES]
    return rows, dict(raw)


def compared(words: str, mode: str, theirs: float, ours: float, target: float = 1.0) -> Row:
    """Return a row that compares our seconds in one mode with torch_xla's."""
    share = ours / theirs
    aim = f"at most {target:g} of theirs"
    return Row(f"{words}, {mode}: {share:.2f} of theirs", theirs, ours, "s", aim, share <= target)


def measured(options: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    rows, new = cold_rows(options)
    training = Training(options.size)
    theirs, ours = TorchXla(folder), [Ours(folder, mode) for mode in MODES]
    sides: list[Side] = [theirs, *ours]
    for _ in range(4):
        training.step()  # until the compiler's shardings no longer change
    with console.status("calls on idle devices"):
        calls = blocked(training, sides, options.repeat)
    before = compiled()
    with console.status("training loops"):
        alone, beside = loops(training, sides, options.steps, options.saves, options.loops)
    compilations = compiled() - before
    with console.status("the interpreter lock"):
        holds = longest_hold(training, options.repeat)
    if options.trace or options.timeline:
        timeline(training, ours[0], options)
    for side in ours:
        side.close()
    theirs.close()
    with console.status("memory"):
        peaks = {name: memory(name, options.size, options.budget) for name in ("torch_xla", "ours")}
    call = {name: statistics.median(times) for name, times in calls.items()}
    base = statistics.median(alone)
    added = {name: statistics.median(times) - base for name, times in beside.items()}
    for words, by_side in (
        ("warm: call blocks", call),
        (f"warm: {options.saves} saves add to {options.steps} steps", added),
    ):
        rows += [compared(words, mode, by_side[theirs.name], by_side[s.name]) for mode, s in zip(MODES, ours)]
    hold = statistics.median(holds)
    rows.append(Row("longest hold of the interpreter lock", None, hold * 1e3, "ms", "at most 10 ms", hold <= 0.01))
    share = peaks["ours"] / options.budget
    rows.append(
        Row(
            f"host memory above the state: {share:.2f} of the budget",
            *(peaks["torch_xla"] / MIB, peaks["ours"] / MIB, "MiB"),
            *("at most 1.1", share <= 1.1),
        )
    )
    rows.append(
        Row("graphs compiled during the loops", None, compilations, "", "0", compilations == 0),
    )
    gib = training.nbytes() / (1 << 30)
    raw: dict[str, Any] = {
        "calls": calls,
        "loop alone": alone,
        "loops": beside,
        "holds": holds,
        "memory": peaks,
        "GiB": gib,
    }
    return rows, {**raw, "cold": new}


def timeline(training: Training, side: Ours, options: argparse.Namespace) -> None:
    """Draw one save among training steps, or write it as a trace, as the options say."""
    steps = xc.Timeline()
    settle()
    for number in range(6):
        with steps.span("training step"):
            training.step()
        if number == 1:
            with steps.span("wait for the devices"):
                settle()  # otherwise the call would include the end of the step
            with steps.span("async_save"):
                side.save(number, training.state())
    with steps.span("wait for the devices"):
        settle()
    side.finish()
    assert side.last is not None
    merged = xc.Timeline()
    merged.spans = sorted([*steps.spans, *side.last.timeline.spans], key=lambda span: span.start)
    if options.trace:
        merged.write_trace(options.trace)
    if options.timeline:
        draw(merged, options.timeline)


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, show_lines=True)
    table.add_column("measure")
    for name in ("torch_xla", "ours"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("target", "reached"):
        table.add_column(name)
    for row in rows:
        reached = "" if row.reached is None else "[green]yes[/]" if row.reached else "[bold red]no[/]"
        theirs = "" if row.theirs is None else quantity(row.theirs, row.unit)
        table.add_row(row.measure, theirs, quantity(row.ours, row.unit), row.target, reached)
    return table


def quantity(value: float, unit: str) -> str:
    return f"{value:.3f} s" if unit == "s" else f"{value:.1f} ms" if unit == "ms" else f"{value:,.0f} {unit}".strip()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=size_of, default="1GiB", help="size of the state (1GiB)")
    parser.add_argument("--budget", type=size_of, default="256MiB", help="memory_budget of the writer (256MiB)")
    parser.add_argument("--repeat", type=int, default=5, help="number of calls that are counted (5)")
    parser.add_argument("--steps", type=int, default=50, help="steps of a training loop (50)")
    parser.add_argument("--saves", type=int, default=5, help="saves in a training loop (5)")
    parser.add_argument("--loops", type=int, default=2, help="number of training loops of each kind (2)")
    parser.add_argument("--folder", help="folder on the disk to measure (the system's temporary folder)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--timeline", type=Path, help="also draw the timeline of one save into this PNG")
    parser.add_argument("--trace", type=Path, help="also write that timeline as a trace for ui.perfetto.dev")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows, raw = measured(options, Path(folder))
    console.print(table_of(rows, f"{raw['GiB']:.2f} GiB of AdamW state over 8 devices, {os.cpu_count()} processors"))
    alone = statistics.median(raw["loop alone"])
    console.print(f"a loop of {options.steps} steps alone takes {alone:.1f} s; times are medians, compare their ratios")
    pages = [one["page"] for found in raw["cold"].values() for one in found]
    first, again = (statistics.median(times) * 1e6 for times in zip(*pages))
    console.print(f"the first use of a page took {first:.1f} microseconds after the cold loops, {again:.1f} when warm")
    if options.json:
        report = {"rows": [asdict(row) for row in rows], **raw}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

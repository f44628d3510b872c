"""The steps that are lost when a training program is killed: ``when.Idle`` beside fixed intervals.

A program trains on eight virtual devices, and saves asynchronously where its policy wants to. SIGKILL ends it at a
random moment. The steps after the newest step that restores whole are lost. Each policy is killed at the same moments.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from rich.console import Console
from rich.table import Table

import torch_xla_ckpt as xc
from benchmarks.sizes import size_of
from benchmarks.storage_parts.state import Data, Sharding, settle

POLICIES: dict[str, Callable[[], xc.when.When]] = {
    "Every(steps=200)": lambda: xc.when.Every(steps=200),
    "Every(steps=50)": lambda: xc.when.Every(steps=50),
    "Every(seconds=2)": lambda: xc.when.Every(seconds=2),
    "Idle(seconds=0, blocking=0.1)": lambda: xc.when.Idle(seconds=0, blocking=0.1),
    "Idle(seconds=0, blocking=0.02)": lambda: xc.when.Idle(seconds=0, blocking=0.02),
}
PROCESSES = multiprocessing.get_context("spawn")
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@dataclass
class Row:
    """What happened to the programs with one policy.

    Args:
        policy: the policy.
        lost: the steps that each kill has lost.
        steps: the steps that each program had trained.
        saves: the saves that each program had committed.
        blocked: for each program, the share of the training time for which saves held it up.
    """

    policy: str
    lost: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)


def train(run: str, policy: str, nbytes: int, steps: Synchronized[int], blocked: Synchronized[float]) -> None:
    """Train until somebody kills this process. ``steps`` counts the steps, ``blocked`` the seconds of saving calls."""
    state = Data(nbytes).on_devices(Sharding((4, 2)))
    with xc.CheckpointManager(run, when=POLICIES[policy](), keep=xc.keep.All(), sync=False) as manager:
        manager.save(0, {**state, "step": 0}, force=True)
        step = 0
        while True:
            step += 1
            for tensor in state.values():
                tensor.add_(1)
            settle()
            steps.value = step
            start = time.perf_counter()
            manager.save_async(step, {**state, "step": step})
            blocked.value += time.perf_counter() - start


def killed(row: Row, nbytes: int, seconds: float) -> None:
    """Start a program, kill it when it has trained for some seconds, and see what is left."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        steps, blocked = PROCESSES.Value("q", 0), PROCESSES.Value("d", 0.0)
        process = PROCESSES.Process(target=train, args=(run, row.policy, nbytes, steps, blocked), daemon=True)
        process.start()
        while not steps.value:
            if not process.is_alive():
                raise SystemExit("the training program has failed; its error is above")
            time.sleep(0.01)
        time.sleep(seconds)
        process.kill()
        process.join()
        with xc.CheckpointManager(run, chkpt_on_preemption=False) as manager:
            saved = manager.all_steps()
        target = {"step": -1}
        xc.load(target, Path(run) / str(saved[-1]), only="step")
        if target["step"] != saved[-1] or not xc.verify(Path(run) / str(saved[-1])):
            raise SystemExit(f"step {saved[-1]} is not what was saved")
        row.lost.append(steps.value - saved[-1])
        row.steps.append(steps.value)
        row.saves.append(len(saved) - 1)
        row.blocked.append(blocked.value / seconds)


def table_of(rows: list[Row], options: argparse.Namespace) -> Table:
    table = Table(title=f"{options.size >> 20} MiB, {options.kills} kills each after 2 to {options.longest:g} s")
    table.add_column("policy")
    for name in ("steps lost, mean", "most", "saves", "steps a second", "training held up"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.policy,
            f"{statistics.mean(row.lost):.1f}",
            f"{max(row.lost)}",
            f"{statistics.mean(row.saves):.1f}",
            f"{sum(row.steps) / options.trained:.0f}",
            f"{statistics.mean(row.blocked):.1%}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=size_of, default="64MiB", help="size of the state, a power of two (64MiB)")
    parser.add_argument("--kills", type=int, default=5, help="number of kills for each policy (5)")
    parser.add_argument("--longest", type=float, default=8, help="the longest training in seconds (8)")
    options = parser.parse_args()
    generator = random.Random(0)
    moments = [generator.uniform(2, options.longest) for _ in range(options.kills)]
    options.trained = sum(moments)
    rows = [Row(policy) for policy in POLICIES]
    for number, seconds in enumerate(moments):
        with console.status(f"kill {number + 1} of {options.kills}"):
            for row in rows:
                killed(row, options.size, seconds)
    console.print(table_of(rows, options))


if __name__ == "__main__":
    main()

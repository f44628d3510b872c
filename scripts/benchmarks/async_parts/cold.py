"""The costs of a program's first saves, for ``scripts/benchmarks/async_saves``; printed as JSON.

Each side runs in a new process, so that no allocator holds memory of earlier saves. The process trains without saves,
waits until the machine's host has taken back the freed memory, and trains with saves. The host also takes back memory
that a save frees, so later saves of the loop may find cold memory again. ``page`` measures how cold: the first use of
a page after the loop, and the use of a page that was freed a moment ago.
"""

from __future__ import annotations

import argparse
import json
import mmap
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.async_parts.sides import MIB, MODES, Ours, Side, TorchXla, Training, settle, side_of

GIVEN_BACK = 5.0  # seconds; Linux reports free pages to the host every 2 seconds


def loop(training: Training, side: Side | None, steps: int, saves: int) -> tuple[float, list[float]]:
    """Return the seconds of a training loop until everything is written, and of each call on idle devices."""
    due = {(2 * n + 1) * steps // (2 * saves) for n in range(saves)}
    calls = []
    start = time.perf_counter()
    for step in range(steps):
        training.step()
        if step in due:
            settle()  # in both loops, so that no call includes the end of a step
            if side is not None:
                state = training.state()
                calls.append(seconds(lambda step=step, state=state: side.save(step, state)))  # type: ignore[misc]
    settle()
    if side is not None:
        side.finish()
    return time.perf_counter() - start, calls


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def page_costs() -> list[float]:
    """Return the seconds of a page's first use, and of its use after it was free for a moment."""
    costs = []
    for _ in range(2):
        with mmap.mmap(-1, 256 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            start = time.perf_counter()
            for at in range(0, len(memory), mmap.PAGESIZE):
                memory[at] = 1
            costs.append((time.perf_counter() - start) * mmap.PAGESIZE / len(memory))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=(TorchXla.name, *MODES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, required=True, help="size of the state in bytes")
    parser.add_argument("--steps", type=int, required=True, help="steps of a training loop")
    parser.add_argument("--saves", type=int, required=True, help="saves in a training loop")
    options = parser.parse_args()
    training = Training(options.size)
    side = side_of(options.side, options.folder)
    for _ in range(4):
        training.step()
    settle()
    alone, _ = loop(training, None, options.steps, options.saves)
    time.sleep(GIVEN_BACK)
    beside, calls = loop(training, side, options.steps, options.saves)
    time.sleep(GIVEN_BACK)
    pages = page_costs()
    if isinstance(side, Ours):  # one more save, into memory that the others kept, compared bit for bit
        side.save(options.steps, training.state())
        side.finish()
        side.check(training)
    side.close()
    print(json.dumps({"alone": alone, "beside": beside, "calls": calls, "page": pages}))


if __name__ == "__main__":
    main()

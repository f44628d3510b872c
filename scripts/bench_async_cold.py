"""What the first saves of a program cost it, for ``bench_async``; printed as JSON.

Each side runs in a process of its own, so that no allocator has memory of earlier saves. The process trains without
saves, waits until the machine's host has taken back the memory that was freed, and trains with saves. The host takes
back what a save frees, too, so later saves of the loop may find cold memory again. ``page`` says how cold it was: the
cost of the first use of a page after the loop, and the cost of using a page again that was just freed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import time
from collections.abc import Callable
from pathlib import Path

from bench_async_sides import MIB, MODES, Ours, Side, TorchXla, Training, settle, side_of

GIVEN_BACK = 5.0  # seconds; Linux reports free pages to a host every two


def loop(training: Training, side: Side | None, steps: int, saves: int) -> tuple[float, list[float]]:
    """Seconds of a training loop until all is written, and of each call on idle devices."""
    due = {(2 * n + 1) * steps // (2 * saves) for n in range(saves)}
    calls = []
    start = time.perf_counter()
    for step in range(steps):
        training.step()
        if step in due:
            settle()  # in both loops: what a call waits for is the step, not the save
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
    """Seconds for the first use of a page, and for its use when it was free for a moment only."""
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
    parser.add_argument("--size", type=int, required=True, help="of the state, in bytes")
    parser.add_argument("--steps", type=int, required=True, help="of a training loop")
    parser.add_argument("--saves", type=int, required=True, help="in a training loop")
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
    if isinstance(side, Ours):  # one more save, which uses again what the others kept, compared bit for bit
        side.save(options.steps, training.state())
        side.finish()
        side.check(training)
    side.close()
    print(json.dumps({"alone": alone, "beside": beside, "calls": calls, "page": pages}))


if __name__ == "__main__":
    main()

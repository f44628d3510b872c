"""A fair stopwatch: contenders take turns, and each finds warm memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Measured = Mapping[str, Sequence[float]]


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Args:
        name: the contender's name in the results.
        run: the function to time.
        prepare: a function to call before, not timed. It removes the last result, so that only a new one passes.
        check: a function to call after, not timed. It raises an error if the result is wrong.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    check: Callable[[], object] = nothing


class WarmMemory:
    """Memory kept from the system, and released just before a contender is timed.

    A virtual machine may return free memory to its host within two seconds. The next use of such a page costs more
    than ten times as much: writing a GiB to the page cache took 0.2 s or 3 s by chance. The kernel gives out pages
    first that were freed a moment ago. Huge pages are used because the kernel prefers them.

    Args:
        nbytes: the memory that a contender uses, in bytes.
    """

    def __init__(self, nbytes: int):
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)

    def hold(self) -> None:
        """Use every page, so that this object holds it."""
        for start in range(0, len(self._map), mmap.PAGESIZE):
            self._map[start] = 1

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)


def tidy() -> None:
    """Return the free memory of this process to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def in_turns(contenders: Sequence[Contender], repeat: int, warm: WarmMemory) -> dict[str, list[float]]:
    """Return the seconds of each run by contender. A first round is not counted.

    Every round runs each contender once, so that other work of the machine slows all contenders alike.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(repeat + 1):
        for contender in contenders:
            taken = _timed(contender, warm)
            if number:
                seconds[contender.name].append(taken)
    return seconds


def processor_time(contender: Contender, repeat: int, warm: WarmMemory) -> list[float]:
    """Return each run's processor time divided by the number of processors, in seconds. No run can be faster."""
    return [_timed(contender, warm, time.process_time) / (os.cpu_count() or 1) for _ in range(repeat)]


def ratio(measured: Measured, slower: str, *faster: str) -> float:
    """Return one contender's median divided by the sum of the others' medians."""
    return statistics.median(measured[slower]) / sum(statistics.median(measured[name]) for name in faster)


def _timed(contender: Contender, warm: WarmMemory, clock: Callable[[], float] = time.perf_counter) -> float:
    contender.prepare()
    gc.collect()
    os.sync()  # earlier writes must not be flushed during the run
    warm.hold()
    warm.release()
    start = clock()
    contender.run()
    taken = clock() - start
    contender.check()
    return taken

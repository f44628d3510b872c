"""A fair stopwatch: contenders take turns, on memory that is warm for all of them."""

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
        name: of the contender in the results.
        run: what is timed.
        prepare: runs before, not timed: removes the last result, so that only a new one can pass the check.
        check: runs after, not timed: raises if the result is wrong.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    check: Callable[[], object] = nothing


class WarmMemory:
    """Memory kept from the system, and given back just before something is timed.

    A virtual machine may hand memory that is free to its host, within two seconds, and the next touch of such a page
    costs more than ten times as much: a GiB went to the page cache in 0.2 s or in 3 s, as chance had it. Pages that
    were freed a moment ago are given out first. Huge ones, because the kernel keeps those on top that it need not
    put together.

    Args:
        nbytes: as much as a contender uses.
    """

    def __init__(self, nbytes: int):
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)

    def hold(self) -> None:
        """Have every page, from here on."""
        for start in range(0, len(self._map), mmap.PAGESIZE):
            self._map[start] = 1

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)


def tidy() -> None:
    """Give back to the system what this process does not need now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def in_turns(contenders: Sequence[Contender], repeat: int, warm: WarmMemory) -> dict[str, list[float]]:
    """Seconds of each run by contender; a first round is not counted.

    Every round runs each contender once, so that whatever else the machine does meets all of them alike.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(repeat + 1):
        for contender in contenders:
            taken = _timed(contender, warm)
            if number:
                seconds[contender.name].append(taken)
    return seconds


def processor_time(contender: Contender, repeat: int, warm: WarmMemory) -> list[float]:
    """Seconds of processor time that each run takes, by the number of processors: no run can be faster."""
    return [_timed(contender, warm, time.process_time) / (os.cpu_count() or 1) for _ in range(repeat)]


def ratio(measured: Measured, slower: str, *faster: str) -> float:
    """A contender's median by the sum of the others' medians."""
    return statistics.median(measured[slower]) / sum(statistics.median(measured[name]) for name in faster)


def _timed(contender: Contender, warm: WarmMemory, clock: Callable[[], float] = time.perf_counter) -> float:
    contender.prepare()
    gc.collect()
    os.sync()  # what was written before must not be flushed while this runs
    warm.hold()
    warm.release()
    start = clock()
    contender.run()
    taken = clock() - start
    contender.check()
    return taken

"""Limits of memory and threads, which the writer, the reader and ``verify`` share."""

from __future__ import annotations

import os

_MOST_THREADS = 8
_REMOTE_THREADS = 24  # streams that together are faster than most links, with 100 MiB a second each
_ROUNDS = 4  # requests that each thread makes one after the other, if there are enough bytes
_LEAST_BYTES, _MOST_BYTES = 8 << 20, 32 << 20  # of one request to a store


def check_limits(memory_budget: int, threads: int | None) -> None:
    """Refuse a memory budget in bytes or a number of threads that is not positive.

    Raises:
        ValueError: one of them is not positive.
    """
    if memory_budget <= 0 or (threads is not None and threads <= 0):
        raise ValueError("memory_budget and threads must be positive")


def default_threads(*, remote: bool) -> int:
    """Return the number of threads to use if the user does not choose.

    Args:
        remote: whether the threads wait for a remote store rather than for processor cores.
    """
    return _REMOTE_THREADS if remote else min(_MOST_THREADS, os.cpu_count() or 1)


class ObjectSizes:
    """The sizes of the objects of a save: half of the mean, the mean, and half more.

    Requests of one size that begin together end together, and then the link is idle while all answers are handled. So
    sizes change from object to object. The last objects are small: their requests begin when all data has been fetched,
    and the save waits for them. Larger ones before them make up for that.

    Args:
        mean: the mean size in bytes.
        total: bytes of all objects.
    """

    def __init__(self, mean: int, total: int):
        self._mean = mean
        self._total = self._left = total
        self._count = 0

    def after(self, nbytes: int) -> int:
        """Return the size of the next object in bytes.

        Args:
            nbytes: bytes of the object before it; 0 if there is none.
        """
        self._left -= nbytes
        self._count += 1
        if self._left <= min(4 * self._mean, self._total // 3):
            halves = 1
        elif self._left <= 10 * self._mean:
            halves = 2
        elif self._left <= 24 * self._mean:
            halves = 3
        else:
            halves = 1 + self._count % 3
        return min(halves * self._mean // 2, _MOST_BYTES)


def request_bytes(total: int, threads: int, memory_budget: int) -> int:
    """Return the bytes to move in one request to a store, so that all threads have work until the end.

    A request takes a fixed time, and then as long as its bytes take. Small requests waste time on the first part, and
    cost money. Large ones leave threads idle at the end, and the memory budget holds fewer of them.

    Args:
        total: all bytes to move.
        threads: the number of threads that make requests.
        memory_budget: the most bytes in memory.
    """
    return min(max(_LEAST_BYTES, min(total // (_ROUNDS * threads), memory_budget // threads)), _MOST_BYTES)

"""Limits of memory and threads, which the writer, the reader and ``verify`` share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

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


def varied(nbytes: int) -> Iterator[int]:
    """Yield sizes of requests in bytes without end: half of ``nbytes``, ``nbytes``, and half more, again and again.

    Requests of one size that begin together end together. Then the link is idle while all answers are handled.
    """
    return (min(share * nbytes // 2, _MOST_BYTES) for share in itertools.cycle((1, 2, 3)))


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

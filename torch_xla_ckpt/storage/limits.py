"""Limits of memory and threads, which the writer, the reader and ``verify`` share."""

from __future__ import annotations

import os

_MOST_THREADS = 8


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
    return _MOST_THREADS if remote else min(_MOST_THREADS, os.cpu_count() or 1)

"""A budget of bytes that keeps one thread from running ahead of the others."""

from __future__ import annotations

import threading


class BudgetClosed(Exception):
    """Nothing more may be taken from the budget, because another thread has failed."""


class MemoryBudget:
    """Bytes that may be in memory at the same time. A single request for more than the budget is admitted alone.

    Args:
        size: the budget in bytes.
    """

    def __init__(self, size: int):
        self._size = size
        self._used = 0
        self._closed = False
        self._changed = threading.Condition()

    def take(self, nbytes: int, *, wait: bool = True, own: int = 0) -> bool:
        """Take bytes from the budget.

        Args:
            nbytes: the number of bytes.
            wait: wait until there is room. If False, return False instead. Default True.
            own: bytes that the caller has taken and will give back only after this call. If nothing else is in use and
                there is still no room, nobody will make room, and the call returns False. Default 0.

        Returns:
            Whether the bytes were taken.

        Raises:
            BudgetClosed: ``close`` was called.
        """
        with self._changed:
            while not self._closed and self._used and self._used + nbytes > self._size:
                if not wait or (own and self._used <= own):
                    return False
                self._changed.wait()
            if self._closed:
                raise BudgetClosed
            self._used += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Return bytes to the budget."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Let all current and future calls of ``take`` raise ``BudgetClosed``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

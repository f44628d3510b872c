"""What a forked child keeps of its parent's saves: nothing.

A fork copies memory but only one thread. The child therefore sees saves that nobody runs there, locks that nobody
will release, and handlers that nobody reads. ``Owner`` tells an object that it belongs to another process;
``in_child`` and ``renew_in_child`` give the child fresh locks.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Process:
    """Stands for one process. Unlike a process id, it is never used again."""


_current = _Process()
_renewals: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


class Owner:
    """The process that made an object.

    Attributes:
        pid: the id of that process.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._process = _current

    @property
    def is_here(self) -> bool:
        """Whether the running process is the owner; False in children forked from it."""
        return self._process is _current

    def refusal(self, what: str) -> str:
        """The text of an error: a forked child uses an object of its parent."""
        return (
            f"this {what} belongs to process {self.pid}; process {os.getpid()} was forked from it and has none of its "
            f"threads. Use the {what} in process {self.pid}, or create another one here"
        )


def in_child(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function in every forked child, before ``os.fork`` returns there; a decorator."""
    if hasattr(os, "register_at_fork"):  # Windows cannot fork
        os.register_at_fork(after_in_child=function)
    return function


def renew_in_child(thing: _T, renew: Callable[[_T], None]) -> None:
    """Call ``renew(thing)`` in every forked child, to replace locks that another thread held during the fork.

    Args:
        thing: held weakly.
        renew: must not refer to ``thing`` itself.
    """
    _renewals[thing] = renew


@in_child
def _renew() -> None:
    global _current
    _current = _Process()
    for thing, renew in list(_renewals.items()):
        renew(thing)

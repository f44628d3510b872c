"""Keep forked children away from the saves of their parent.

A fork copies memory but only one thread. So a child sees saves that no thread runs, and locks that no thread will
release. ``Owner`` tells whether an object belongs to another process. ``in_child`` and ``renew_in_child`` give the
child fresh locks.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class _Process:
    """The identity of one process. Unlike a process id, it is never used again."""


_current = _Process()
_renewals: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


class Owner:
    """The process that created an object.

    Attributes:
        pid: the id of the process.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._process = _current

    @property
    def is_here(self) -> bool:
        """Whether this process is the owner; False in its forked children."""
        return self._process is _current

    def refusal(self, what: str) -> str:
        """Return the text of the error about an object that is used in a forked child.

        Args:
            what: the kind of the object: "manager", for example.
        """
        return (
            f"this {what} belongs to process {self.pid}; process {os.getpid()} was forked from it and has none of its "
            f"threads. Use the {what} in process {self.pid}, or create another one here"
        )


def in_child(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function in every forked child, before ``os.fork`` returns in the child; a decorator."""
    if hasattr(os, "register_at_fork"):  # Windows cannot fork
        os.register_at_fork(after_in_child=function)
    return function


def renew_in_child(thing: _T, renew: Callable[[_T], None]) -> None:
    """Call ``renew(thing)`` in every forked child, to replace locks that another thread held during the fork.

    Args:
        thing: the object. It is referenced weakly, so it can be garbage-collected.
        renew: the function. A reference to ``thing`` in the function would keep ``thing`` alive.
    """
    _renewals[thing] = renew


@in_child
def _renew() -> None:
    global _current
    _current = _Process()
    for thing, renew in list(_renewals.items()):
        renew(thing)

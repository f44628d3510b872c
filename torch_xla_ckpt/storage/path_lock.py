"""Who writes where: saves to one place take path_lock.

This is the one thing that all saves of a program share. A save that is called while another one runs in the background
knows the path they have in common, and nothing else of it.
"""

from __future__ import annotations

import logging
import threading

from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.location import Location

logger = logging.getLogger(__name__)

_changed = threading.Condition()
_turns: list[Turn] = []  # of the saves in the background that have not ended, in the order in which they began


@forks.in_child
def _forget() -> None:
    """The parent's saves end in the parent; nobody in a forked child would ever see their end."""
    global _changed
    _changed = threading.Condition()
    _turns.clear()


class Turn:
    """The place of a save in the background among all others."""

    def __init__(self) -> None:
        self.where: str | None = None  # the identity of a location
        self._thread: int | None = None
        with _changed:
            _turns.append(self)

    def take(self) -> None:
        """In the thread that writes: wait until those that began earlier and write to the same place have ended."""
        self._thread = threading.get_ident()
        if self.where is not None:
            _wait(self.where, self)

    def end(self) -> None:
        with _changed:
            if self in _turns:
                _turns.remove(self)
            _changed.notify_all()


def wait_for(location: Location) -> None:
    """Wait until no async save writes to a location; within an async save, until none that began earlier does."""
    here = threading.get_ident()
    own = next((turn for turn in tuple(_turns) if turn._thread == here), None)
    _wait(location.identity, own)


def _wait(where: str, own: Turn | None) -> None:
    def busy() -> bool:
        earlier = _turns[: _turns.index(own)] if own in _turns else _turns
        return any(turn.where == where for turn in earlier)

    with _changed:
        if busy():
            logger.info("a save to %s waits for the one that is written there in the background", where)
        while busy():
            _changed.wait()

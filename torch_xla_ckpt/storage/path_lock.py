"""Order the saves of this program that write to the same path.

Saves to one path run one after the other: a save waits for the async saves to its path that began earlier. The list of
async saves under way is the only thing that all saves of a program share.
"""

from __future__ import annotations

import logging
import threading

from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.location import Location

logger = logging.getLogger(__name__)

_changed = threading.Condition()
_turns: list[Turn] = []  # of the async saves under way, in the order in which they began


@forks.in_child
def _forget() -> None:
    """Forget the parent's saves, which end in the parent: a forked child would wait for them forever."""
    global _changed
    _changed = threading.Condition()
    _turns.clear()


class Turn:
    """The turn of one async save among all async saves.

    Attributes:
        where: the identity of the location that the save writes to (``Location.identity``); None while it is unknown.
    """

    def __init__(self) -> None:
        self.where: str | None = None
        self._thread: int | None = None
        with _changed:
            _turns.append(self)

    def take(self) -> None:
        """Wait until all earlier async saves to the same path have ended. Call this in the thread that writes."""
        self._thread = threading.get_ident()
        if self.where is not None:
            _wait(self.where, self)

    def end(self) -> None:
        """End the turn, whether the save was committed or failed."""
        with _changed:
            if self in _turns:
                _turns.remove(self)
            _changed.notify_all()


def wait_for(location: Location) -> bool:
    """Wait until no async save writes to a location. Return whether one did.

    Within an async save, only wait for the async saves that began earlier.
    """
    thread = threading.get_ident()
    own = next((turn for turn in tuple(_turns) if turn._thread == thread), None)
    return _wait(location.identity, own)


def _wait(where: str, own: Turn | None) -> bool:
    def busy() -> bool:
        earlier = _turns[: _turns.index(own)] if own in _turns else _turns
        return any(turn.where == where for turn in earlier)

    with _changed:
        waits = busy()
        if waits:
            logger.info("a save to %s waits for an async save to the same path", where)
        while busy():
            _changed.wait()
    return waits

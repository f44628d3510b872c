"""Which steps are being saved now, and how long saves block training."""

from __future__ import annotations

import threading
from typing import NamedTuple

from torch_xla_ckpt.runtime import forks


class Blocked(NamedTuple):
    """Seconds for which calls held up training; 0 before the first call.

    Args:
        save: seconds of the last call of ``save``, which returns when the step is committed.
        save_async: seconds of the last call of ``save_async``, which returns when the state may change.
    """

    save: float = 0.0
    save_async: float = 0.0


class ActiveSaves:
    """Counts the saves of each step that are under way.

    Attributes:
        blocked: seconds for which the last call held up training.
    """

    def __init__(self) -> None:
        self.blocked = Blocked()
        self._counts: dict[int, int] = {}
        self._renew()
        forks.renew_in_child(self, ActiveSaves._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def begin(self, step: int) -> None:
        with self._lock:
            self._counts[step] = self._counts.get(step, 0) + 1

    def end(self, step: int) -> None:
        with self._lock:
            self._counts[step] -= 1
            if not self._counts[step]:
                del self._counts[step]

    def steps(self) -> set[int]:
        """Return the steps that are being saved."""
        with self._lock:
            return set(self._counts)

"""Which steps are being saved now, and how long saves block training."""

from __future__ import annotations

import threading

from torch_xla_ckpt.runtime import forks


class ActiveSaves:
    """Counts the saves of each step that are under way.

    Attributes:
        blocked: seconds for which the last call of ``save`` or ``save_async`` held up training; 0 before the first.
    """

    def __init__(self) -> None:
        self.blocked = 0.0
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

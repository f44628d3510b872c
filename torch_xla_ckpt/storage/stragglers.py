"""When to ask a store a second time, because the answer to a request is late ("hedged requests").

A stalled connection or a slow stream delays a whole save or load. Its request is made again beside the first one, and
the first answer counts. What is late is learnt from the requests that were answered.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque

from torch_xla_ckpt.runtime import forks

STALLED = 30.0
"""Seconds after which any request is made a second time."""
SOONEST = 0.5
"""Seconds before which no request is made a second time."""
LATE = 4.0
"""A request is late if it takes this many times as long as requests of its size usually take."""
KNOWN = 8
"""Answers from which a usual time is computed."""
SHARE = 0.05
"""The largest share of requests that are made a second time before ``STALLED``; two more are allowed."""

_FIXED = 4 << 20  # bytes that take as long as the fixed part of a request, so that sizes can be compared


class Stragglers:
    """The times of requests of one kind."""

    def __init__(self) -> None:
        self._renew()
        forks.renew_in_child(self, Stragglers._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=64)  # seconds for each byte
        self._answers = 0
        self._asked_twice = 0

    def answered(self, nbytes: int, seconds: float) -> None:
        """Learn from an answer.

        Args:
            nbytes: the bytes that the request moved.
            seconds: the time until the answer.
        """
        with self._lock:
            self._answers += 1
            self._recent.append(seconds / (nbytes + _FIXED))

    def patience(self, nbytes: int) -> float:
        """Return the seconds after which a request that moves ``nbytes`` should be made a second time."""
        with self._lock:
            if len(self._recent) < KNOWN or self._asked_twice > 2 + SHARE * self._answers:
                return STALLED
            usual = statistics.median(self._recent) * (nbytes + _FIXED)
        return min(max(SOONEST, LATE * usual), STALLED)

    def ask_twice(self) -> None:
        """Take note that a request is made a second time."""
        with self._lock:
            self._asked_twice += 1

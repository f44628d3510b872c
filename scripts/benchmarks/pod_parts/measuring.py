"""Seconds, memory, and the longest time for which other threads could not run Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")


def memory(what: str) -> float:
    """Return a line of this process's memory status in MiB: ``VmRSS`` now, ``VmHWM`` at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


@dataclass
class Phases:
    """The phases of a program.

    Attributes:
        seconds: how long each phase took, by name.
        pauses: the longest time in seconds, in each phase, that a thread which wants to run every millisecond waited.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    pauses: dict[str, float] = field(default_factory=dict)

    def run(self, name: str, call: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function, and measure the call as the phase ``name``."""
        ended = threading.Event()
        longest = 0.0

        def tick() -> None:
            nonlocal longest
            last = time.perf_counter()
            while not ended.is_set():
                time.sleep(0.001)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.seconds[name] = time.perf_counter() - start
            ended.set()
            thread.join()
            self.pauses[name] = longest

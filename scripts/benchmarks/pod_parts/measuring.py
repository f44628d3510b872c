"""Seconds, memory, and the longest time for which other threads could not run Python.

Other programs slow a busy machine down. So times are also measured in seconds of this process's processor time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")
_FLOORS = 4  # attempts


def memory(what: str) -> float:
    """Return a line of this process's memory status in MiB: ``VmRSS`` now, ``VmHWM`` at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def floor(checkpoint: Path, folder: Path) -> float:
    """Return the seconds that it takes to write the records of a checkpoint again without making them.

    The bytes are in memory. The manifest is a new file, and ``.metadata`` replaces the one before it. As in the
    simulated saves, nothing is fsynced.

    Args:
        checkpoint: the folder of the checkpoint.
        folder: a folder to write to.
    """
    folder.mkdir(exist_ok=True)
    metadata = (checkpoint / ".metadata").read_bytes()
    manifest = next(checkpoint.glob("manifest-*.json")).read_bytes()
    seconds = []
    for number in range(_FLOORS):
        start = time.perf_counter()
        (folder / f"manifest{number}").write_bytes(manifest)
        (folder / "temporary").write_bytes(metadata)
        os.replace(folder / "temporary", folder / ".metadata")
        (folder / f"manifest{number - 1}").unlink(missing_ok=True)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])  # the first one had nothing to replace


@dataclass
class Phases:
    """The phases of a program.

    Attributes:
        seconds: how long each phase took, by name.
        processor: the processor time of each phase in seconds.
        pauses: the longest time in seconds, in each phase, that a thread which wants to run every millisecond waited
            while this process was working.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)
    pauses: dict[str, float] = field(default_factory=dict)

    def run(self, name: str, call: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function, and measure the call as the phase ``name``."""
        ended = threading.Event()
        longest = 0.0

        def tick() -> None:
            nonlocal longest
            last, worked = time.perf_counter(), time.process_time()
            while not ended.is_set():
                time.sleep(0.001)
                now, work = time.perf_counter(), time.process_time()
                longest = max(longest, min(now - last, work - worked))
                last, worked = now, work

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        start, worked = time.perf_counter(), time.process_time()
        try:
            return call(*arguments)
        finally:
            self.seconds[name] = time.perf_counter() - start
            self.processor[name] = time.process_time() - worked
            ended.set()
            thread.join()
            self.pauses[name] = longest

"""The memory that saving or loading takes beside the state, for ``scripts/benchmarks/storage``; printed as JSON.

Runs in a new process, because a process may keep memory that it has freed. There are two numbers: the peak of
anonymous memory (read from /proc every millisecond), and the peak of all resident memory (counted by the kernel). The
second includes the pages of mapped files, which the system can take back at any time.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.storage_parts.sides import TORCH_XLA, Ours, Side
from benchmarks.storage_parts.state import Data, Sharding, settle, spoil
from benchmarks.storage_parts.turns import tidy

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


class Peak:
    """A context manager that measures how far memory rises above its value at the start of the block, in bytes."""

    anonymous = resident = 0

    def __enter__(self) -> Peak:
        tidy()  # otherwise memory freed earlier would be used again and not be counted
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample)
        CLEAR_REFS.write_text("5")  # resets the kernel's peak
        self._before = resident("VmRSS")
        self._anonymous_before = resident("RssAnon")
        self._sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._sampler.join()
        self.resident = resident("VmHWM") - self._before

    def _sample(self) -> None:
        while not self._ended.wait(0.001):
            self.anonymous = max(self.anonymous, resident("RssAnon") - self._anonymous_before)


def measured(run: Callable[[], object]) -> dict[str, int]:
    with Peak() as peak:
        run()
        settle()
    return {"anonymous": peak.anonymous, "resident": peak.resident}


def measure(side: Side, data: Data, folder: Path) -> dict[str, dict[str, int]]:
    state = data.on_devices(Sharding((4, 2)))
    results = {"save": measured(lambda: side.save(state, folder))}
    spoil(state)
    results["load"] = measured(lambda: side.load(state, folder))
    data.check(state)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=(TORCH_XLA.name, Ours.name))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, required=True, help="size of the state in bytes")
    parser.add_argument("--budget", type=int, required=True, help="our memory_budget in bytes")
    options = parser.parse_args()
    side: Side = TORCH_XLA if options.side == TORCH_XLA.name else Ours(options.budget)
    print(json.dumps(measure(side, Data(options.size), options.folder)))


if __name__ == "__main__":
    main()

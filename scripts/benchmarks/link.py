"""Saving to and loading from a simulated object store, beside the time that the link alone would take.

The store is in this process (``test/support/simulated_store.py``): a request takes 40 ms and then as long as its bytes,
a stream moves 100 MiB a second, and all streams together 1 GiB a second. The state lies on eight virtual devices.
Every time is the median of several runs after a warm-up, and every result is compared bit for bit. Beside the times
stand the requests and the bytes that crossed the link, and what the same run takes with a store that answers at once:
the simulation's own work and ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch.distributed.checkpoint as dcp
import torch_xla.experimental.distributed_checkpoint as torch_xla_planners
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import torch_xla_ckpt as xc
from benchmarks.sizes import size_of
from benchmarks.storage_parts.state import Data, Sharding, settle, spoil
from benchmarks.storage_parts.turns import WarmMemory
from support.simulated_store import MIB, Store, count

LATENCY, STREAM, LINK = 0.04, 100 * MIB, 1024 * MIB
TARGET = 1.5
SAVED, OTHER = Sharding((4, 2)), Sharding((2, 4))

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


class Side(Protocol):
    name: str

    def save(self, state: dict[str, Any], url: str, options: Mapping[str, Any]) -> object: ...

    def load(self, state: dict[str, Any], url: str, options: Mapping[str, Any]) -> object: ...


class Ours:
    """This package with its defaults: within ``memory_budget``, with checksums written and verified."""

    name = "ours"

    def save(self, state: dict[str, Any], url: str, options: Mapping[str, Any]) -> object:
        return xc.save(state, url, storage_options=options)

    def load(self, state: dict[str, Any], url: str, options: Mapping[str, Any]) -> object:
        return xc.load(state, url, storage_options=options)


class TorchXla:
    """torch_xla's planners on DCP's fsspec storage."""

    name = "torch_xla"

    def save(self, state: dict[str, Any], url: str, options: Mapping[str, Any]) -> object:
        writer = FsspecWriter(url, sync_files=False, **options)
        return dcp.save(state, storage_writer=writer, planner=torch_xla_planners.SPMDSavePlanner(), no_dist=True)

    def load(self, state: dict[str, Any], url: str, options: Mapping[str, Any]) -> object:
        reader, planner = FsspecReader(url, **options), torch_xla_planners.SPMDLoadPlanner()
        return dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


@dataclass
class Row:
    """One case of one side.

    Args:
        case: the name of the case.
        side: the name of the side.
        nbytes: bytes of the state.
        seconds: the seconds of each run.
        instant: seconds of a run with a store that answers at once.
        requests: requests of one run, by operation.
        moved: bytes that crossed the link in one run.
    """

    case: str
    side: str
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    instant: float = 0.0
    requests: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0

    @property
    def alone(self) -> float:
        """Seconds that the link alone would take."""
        return self.nbytes / LINK

    @property
    def times(self) -> float:
        """The median run as a multiple of the time that the link alone would take."""
        return statistics.median(self.seconds) / self.alone


class Bench:
    """Runs the cases.

    Args:
        data: the state.
        repeat: the number of runs that are counted.
    """

    def __init__(self, data: Data, repeat: int):
        self._data = data
        self._repeat = repeat
        self._warm = WarmMemory(2 * data.nbytes)

    def save(self, side: Side) -> Row:
        """Measure a save into an empty folder, and check it by loading it."""
        state = self._data.on_devices(SAVED)

        def run(store: Store, number: int) -> Callable[[], object]:
            store.clear()
            return lambda: side.save(state, store.url(f"run-{number}"), store.options)

        def check(store: Store, number: int) -> None:
            spoil(state)
            with Store() as fast:
                fast.share(store)
                # torch_xla's planners lose tensors in some layouts, but not in this one.
                side.load(state, fast.url(f"run-{number}"), fast.options)
            settle()
            self._data.check(state)

        return self._measured("save", side, run, check)

    def load(self, side: Side, case: str, target: Sharding) -> Row:
        """Measure a load of a checkpoint that was saved from the mesh (4, 2)."""
        state = self._data.on_devices(target)
        with Store() as saved:
            side.save(self._data.on_devices(SAVED), saved.url("run"), saved.options)

            def run(store: Store, number: int) -> Callable[[], object]:
                store.share(saved)
                spoil(state)

                def load() -> None:
                    side.load(state, store.url("run"), store.options)
                    settle()

                return load

            return self._measured(case, side, run, lambda store, number: self._data.check(state))

    def _measured(
        self,
        case: str,
        side: Side,
        run: Callable[[Store, int], Callable[[], object]],
        check: Callable[[Store, int], None],
    ) -> Row:
        row = Row(case, side.name, self._data.nbytes)
        for number in range(self._repeat + 1):
            with Store(LATENCY, STREAM, LINK) as store:
                action = run(store, number)
                with store.recorded() as requests:
                    seconds = timed(action, self._warm)
                check(store, number)
            if number:
                row.seconds.append(seconds)
                row.requests, row.moved = dict(count(requests)), sum(request.nbytes for request in requests)
        with Store() as store:
            row.instant = timed(run(store, 0), self._warm)
        return row


def timed(action: Callable[[], object], warm: WarmMemory) -> float:
    """Return the seconds that a function takes, on memory that the host of a virtual machine has not taken back."""
    gc.collect()
    warm.hold()
    warm.release()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def table_of(rows: list[Row], size: int) -> Table:
    table = Table(title=f"{size // MIB} MiB; the link alone takes {size / LINK:.2f} s", show_lines=True)
    for name in ("case", "side", "seconds", "times the link", f"target {TARGET}", "store at once", "requests", "moved"):
        table.add_column(name)
    for row in rows:
        reached = "" if row.side != Ours.name else "[green]yes[/]" if row.times <= TARGET else "[bold red]no[/]"
        seconds = f"{statistics.median(row.seconds):.2f} ({min(row.seconds):.2f} to {max(row.seconds):.2f})"
        operations = ", ".join(f"{number} {operation}" for operation, number in Counter(row.requests).most_common())
        moved = f"{row.moved / row.nbytes:.2f}"
        table.add_row(row.case, row.side, seconds, f"{row.times:.2f}", reached, f"{row.instant:.2f}", operations, moved)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=size_of, default="512MiB", help="size of the state, a power of two (512MiB)")
    parser.add_argument("--repeat", type=int, default=5, help="number of runs that are counted (5)")
    parser.add_argument("--only-ours", action="store_true", help="leave out torch_xla's planners, which take a minute")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    bench = Bench(Data(options.size), options.repeat)
    sides: list[Side] = [Ours()] if options.only_ours else [Ours(), TorchXla()]
    rows: list[Row] = []
    for side in sides:
        rows.append(bench.save(side))
        rows.append(bench.load(side, "load, same mesh", SAVED))
        rows.append(bench.load(side, "load, (4, 2) onto (2, 4)", OTHER))
    console.print(table_of(rows, options.size))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"times": row.times} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()

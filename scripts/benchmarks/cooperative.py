"""Bytes that processes read from a simulated object store, and the time of a load, with and without reading together.

Every process loads the whole state into host memory, as data-parallel replicas do, and compares every bit. A process
is a host with a store of its own in its memory (``test/support/simulated_store.py``): the objects are the same, and a
request takes 40 ms and then as long as its bytes. Two cases differ in the link: each host has a link of 1 GiB/s of its
own, or the store has one link of 1 GiB/s, which all hosts share. The hosts are processes of one machine, so everything
that they pass on, hash and copy competes for the same processor cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import torch_xla_ckpt as xc
from benchmarks.sizes import size_of
from support.simulated_store import MIB, Store

LATENCY, STREAM, LINK = 0.04, 100 * MIB, 1024 * MIB
LINKS = {"a link for each host": False, "one link for all hosts": True}
TARGET = 1.05
TENSORS = 16

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@dataclass
class Row:
    """One case.

    Args:
        world: the number of processes.
        link: the kind of link.
        cooperative: the option of the load.
        unique: bytes of the checkpoint's files.
        read: bytes that all processes together have read from the store.
        own: bytes that each process has read.
        seconds: the seconds of each run, of the slowest process.
    """

    world: int
    link: str
    cooperative: bool
    unique: int
    read: int = 0
    own: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def times(self) -> float:
        """Bytes read from the store over the unique bytes."""
        return self.read / self.unique

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


def state_of(size: int) -> dict[str, Any]:
    """Return tensors of ``size`` bytes together, and some objects."""
    generator = torch.Generator().manual_seed(0)
    shape = (size // TENSORS // 4 // 256, 256)
    tensors = {f"layers.{n}.weight": torch.rand(shape, generator=generator) for n in range(TENSORS)}
    return {"model": tensors, "step": 5, "history": list(range(20_000))}


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    model = {key: torch.zeros_like(tensor) for key, tensor in state["model"].items()}
    return {"model": model, "step": 0, "history": [0]}


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = [key for key, tensor in expected["model"].items() if not torch.equal(found["model"][key], tensor)]
    if wrong or any(found[key] != expected[key] for key in ("step", "history")):
        raise SystemExit(f"the load gave wrong values: {wrong}")


def host(rank: int, world: int, folder: str, size: int, repeat: int, results: Any) -> None:
    """Act as one host, and put the rows of all cases into ``results`` on rank 0."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{world}", rank=rank, world_size=world)
    expected = state_of(size)
    target = empty_like(expected)
    files = sorted(Path(folder, "checkpoint").iterdir())
    rows = []
    for link, is_shared in LINKS.items():
        for cooperative in (False, True):
            row = Row(world, link, cooperative, sum(file.stat().st_size for file in files))
            for number in range(repeat + 1):
                with Store(LATENCY, STREAM, LINK / world if is_shared else LINK) as store:
                    store.share(store)  # the objects are maps of files, which the store must not use again
                    store.objects = {f"bucket/run/{file.name}": np.memmap(file, np.uint8, "r") for file in files}
                    store.modified = dict.fromkeys(store.objects, 0.0)
                    for tensor in target["model"].values():
                        tensor.zero_()
                    target |= {"step": 0, "history": [0]}
                    dist.barrier()
                    start = time.perf_counter()
                    with store.recorded() as requests:
                        xc.load(target, store.url("run"), storage_options=store.options, cooperative=cooperative)
                    seconds = torch.tensor(time.perf_counter() - start)
                check(target, expected)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                own: list[int] = [0] * world
                read = sum(request.nbytes for request in requests if request.operation == "get")
                dist.all_gather_object(own, read)
                row.own, row.read = own, sum(own)
                if number:  # the first one warms up
                    row.seconds.append(float(seconds))
            rows.append(row)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def measured(world: int, folder: str, size: int, repeat: int) -> list[Row]:
    """Return the rows of a number of processes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (world, folder, size, repeat, results)
    hosts = [context.Process(target=host, args=(rank, *arguments)) for rank in range(world)]
    for one in hosts:
        one.start()
    for one in hosts:
        one.join()
    if any(one.exitcode for one in hosts):
        raise SystemExit(f"a process of {world} failed")
    rows: list[Row] = results.get()
    return rows


def table_of(rows: list[Row], size: int) -> Table:
    table = Table(title=f"{size // MIB} MiB on every process", show_lines=True)
    for name in ("processes", "link", "cooperative", "store reads over unique", f"target {TARGET}", "most over mean"):
        table.add_column(name)
    table.add_column("seconds")
    table.add_column("against not cooperating")
    for row in rows:
        other = next(one for one in rows if (one.world, one.link) == (row.world, row.link) and not one.cooperative)
        reached = "" if not row.cooperative else "[green]yes[/]" if row.times <= TARGET else "[bold red]no[/]"
        balance = f"{max(row.own) * row.world / row.read:.2f}"
        against = f"{row.median / other.median:.2f}" if row.cooperative else ""
        seconds = f"{row.median:.2f} ({min(row.seconds):.2f} to {max(row.seconds):.2f})"
        values = (str(row.world), row.link, "yes" if row.cooperative else "no", f"{row.times:.3f}")
        table.add_row(*values, reached, balance, seconds, against)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=size_of, default="256MiB", help="size of the state (256MiB)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of processes (1 2 4 8)")
    parser.add_argument("--repeat", type=int, default=3, help="number of runs that are counted (3)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        xc.save(state_of(options.size), f"{folder}/checkpoint", sync=False)
        for world in options.processes:
            rows += measured(world, folder, options.size, options.repeat)
    console.print(table_of(rows, options.size))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"times": row.times} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The time of planning: the proofs, whole plans, and DCP's own validation of the same chunks.

Tensors are cut along the first dimension, the last dimension, or both. Every number is a median after a warm-up. DCP's
validation is quadratic in the number of chunks, so it is measured for one tensor and multiplied. The benchmark first
checks that the proof detects a lost chunk and a doubled chunk.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import IncompleteCheckpointError
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.planner import ReadPlanner
from torch_xla_ckpt.planner.owners import prove_complete
from torch_xla_ckpt.planner.save import SPMDSavePlanner

SHAPE = (4096, 4096)
CUTS = {"rows": (1024, 1), "columns": (1, 1024), "grid": (32, 32)}
PROPERTIES = TensorProperties(dtype=torch.float32)


def boxes(cut: tuple[int, int]) -> list[Box]:
    sizes = tuple(n // parts for n, parts in zip(SHAPE, cut))
    return [Box((a * sizes[0], b * sizes[1]), sizes) for a in range(cut[0]) for b in range(cut[1])]


def saved(cut: tuple[int, int]) -> TensorStorageMetadata:
    return TensorStorageMetadata(PROPERTIES, torch.Size(SHAPE), [_dcp.chunk_of(box) for box in boxes(cut)])


def median(run: Callable[[], object], repeat: int) -> float:
    """Return the median seconds of ``repeat`` runs, after one run that is not counted."""
    run()
    gc.collect()
    gc.freeze()  # the collector must not walk the millions of objects that this benchmark has prepared
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    gc.unfreeze()
    return statistics.median(times)


def check_that_it_proves(cut: tuple[int, int]) -> None:
    """Check that the proof detects a lost chunk and a doubled chunk; otherwise its time means nothing."""
    for spoil in (lambda chunks: chunks[:-1], lambda chunks: [*chunks, chunks[0]]):
        broken = saved(cut)
        broken.chunks = spoil(broken.chunks)
        try:
            prove_complete({"t": broken})
        except IncompleteCheckpointError:
            continue
        raise SystemExit("the proof accepted a broken checkpoint")


def plans(cut: tuple[int, int], tensors: int, processes: int) -> list[SavePlan]:
    """Return the local plans of processes that each hold an equal share of every tensor's chunks."""
    pieces = boxes(cut)
    share = len(pieces) // processes
    entries = [_dcp.Entry(f"t{n}", (f"t{n}",), torch.float32, SHAPE) for n in range(tensors)]
    counts = np.full(tensors, share, dtype=np.int64)
    found = []
    for rank in range(processes):
        rows = np.array([_dcp.padded_row(box, 2) for box in pieces[rank * share : (rank + 1) * share]], dtype=np.int64)
        offers: Any = _dcp.Offers(entries, counts, np.tile(rows, (tensors, 1)))
        found.append(SavePlan(offers))
    return found


def measure(cut: tuple[int, int], tensors: int, repeat: int) -> dict[str, float]:
    """Return the seconds for all ``tensors``; for DCP's validation, the seconds for one tensor."""
    check_that_it_proves(cut)
    metadata = {f"t{n}": saved(cut) for n in range(tensors)}
    gathered = plans(cut, tensors, processes=4)
    needed = [Box((a * 1024, b * 2048), (1024, 2048)) for a in range(4) for b in range(2)]  # of a (4, 2) mesh
    one = Metadata({"t": saved(cut)})
    return {
        "proof": median(lambda: prove_complete(metadata), repeat),
        "save_plan": median(lambda: SPMDSavePlanner().create_global_plan(gathered), repeat),
        "load_plan": median(lambda: [ReadPlanner(key, key, md).plan(needed) for key, md in metadata.items()], repeat),
        "stock_each": median(lambda: _validate_global_plan([SavePlan([])], one), repeat),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()

    table = Table(title=f"{options.tensors} tensors of 1,024 chunks each, 4 processes (seconds on this machine)")
    for column in ("cut by", "proof", "whole save plan", "whole load plan", "DCP's validation*", "proof is faster"):
        table.add_column(column, justify="left" if column == "cut by" else "right")
    results = {}
    for name, cut in CUTS.items():
        times = results[name] = measure(cut, options.tensors, options.repeat)
        stock = times["stock_each"] * options.tensors
        times["ratio"] = stock / times["proof"]
        row = (times["proof"], times["save_plan"], times["load_plan"], stock)
        table.add_row(name, *(f"{seconds:.1f}" for seconds in row), f"{times['ratio']:.0f} times")
    console = Console()
    console.print(table)
    console.print("* measured for one tensor and multiplied; it runs for several processes only, and never on load")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"tensors": options.tensors, "chunks": 1024, "seconds": results}, file, indent=2)


if __name__ == "__main__":
    main()

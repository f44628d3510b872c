"""Ranks that save and load over groups which this package makes, on any torch.

    groups.py uneven|restarted FOLDER

"uneven": three ranks, of which rank 1 is in one more process group than rank 0.
"restarted": two ranks, of which rank 1 is replaced by another process. Rank 0 sets torch.distributed up again.

The exit status is 0 if all ranks found what was saved.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import torch_xla_ckpt as xc

TIMEOUT = timedelta(seconds=40)


def uneven(process: int, folder: Path) -> None:
    join(folder / "rendezvous", process, 3)
    first = dist.new_group([0, 1], timeout=TIMEOUT)
    if process > 0:
        dist.new_group([1, 2], timeout=TIMEOUT, use_local_synchronization=True)
    if process < 2:
        save_and_load(folder / "run", process, first)
    dist.barrier()
    dist.destroy_process_group()


def restarted(process: int, folder: Path) -> None:
    generations = [(0, 0), (1, 0)] if process == 0 else [(process - 1, 1)]
    for generation, rank in generations:
        join(folder / f"rendezvous{generation}", rank, 2)
        save_and_load(folder / f"run{generation}", rank)
        dist.destroy_process_group()


def join(rendezvous: Path, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=TIMEOUT)


def save_and_load(run: Path, rank: int, group: dist.ProcessGroup | None = None) -> None:
    with xc.CheckpointManager(run, 1, process_group=group, timeout=TIMEOUT) as manager:
        manager.save_async(1, {"t": torch.arange(20.0)})
        manager.wait()
    found = {"t": torch.zeros(20)}
    report = xc.load(found, run / "1", cooperative=True, process_group=group)
    assert found["t"].equal(torch.arange(20.0)) and (rank == 0 or report.bytes_received), report


if __name__ == "__main__":
    scenario = {"uneven": uneven, "restarted": restarted}[sys.argv[1]]
    children = []
    for number in range(3):
        child = os.fork()
        if not child:
            scenario(number, Path(sys.argv[2]))
            sys.exit(0)
        children.append(child)
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))

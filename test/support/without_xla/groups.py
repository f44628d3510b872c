"""Three ranks, of which rank 1 is in one more process group than rank 0, save and load in the group of both.

groups.py FOLDER

It runs on every torch. The program's exit status is 0 if all ranks found what was saved.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import torch_xla_ckpt as xc

WORLD = 3
TIMEOUT = timedelta(seconds=40)


def main(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=TIMEOUT
    )
    first = dist.new_group([0, 1], timeout=TIMEOUT)
    if rank > 0:
        dist.new_group([1, 2], timeout=TIMEOUT, use_local_synchronization=True)
    if rank < 2:
        with xc.CheckpointManager(folder / "run", 1, process_group=first, timeout=TIMEOUT) as manager:
            manager.save_async(1, {"t": torch.arange(20.0)})
            manager.wait()
        found = {"t": torch.zeros(20)}
        report = xc.load(found, folder / "run" / "1", cooperative=True, process_group=first)
        assert found["t"].equal(torch.arange(20.0)) and (rank == 0 or report.bytes_received), report
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = []
    for number in range(WORLD):
        child = os.fork()
        if not child:
            main(number, Path(sys.argv[1]))
            sys.exit(0)
        ranks.append(child)
    sys.exit(any([os.waitpid(child, 0)[1] for child in ranks]))

"""Three ranks save asynchronously, and each of them fails at times.

async_ranks.py FOLDER WAY

WAY is "xc" or "dcp". It runs on every torch. The program's exit status is 0 if no failure changed another save.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc

WORLD = 3


class Unpickled:
    """An object that cannot be pickled."""

    def __reduce__(self):
        raise OSError("no bytes")


def main(rank: int, folder: str, way: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    other = dist.new_group(backend="gloo")
    errors = []
    stager = xc.SPMDStager("host", timeout=timedelta(seconds=30))
    for number in range(12):
        path = f"{folder}/{number}"
        state = {"t": torch.full((3,), number), f"own{rank}": number}
        if number % 3 == 0 and rank == number // 3 % WORLD:
            state["bad"] = Unpickled()
        try:
            if way == "xc":
                future = xc.async_save(state, path, stager=stager).upload_completion
            else:
                group = other if number > 6 else None
                planner = xc.SPMDSavePlanner()
                future = dcp.async_save(
                    state, checkpoint_id=path, planner=planner, async_stager=stager, process_group=group
                ).upload_completion
            assert stager._saves[-1].where == path, "saves to the same path would not wait for this one"
            if rank == 1 and (error := future.exception(60)) is not None:  # the others learn of errors from calls
                errors.append(error)
        except xc.CheckpointError as error:
            errors.append(error)
    stager.wait()
    stager.close()
    dist.barrier()
    assert len(errors) == 4 and all("'bad'" in str(error) for error in errors), errors
    for number in range(12):
        if number % 3:
            found = {"t": torch.zeros(3), **{f"own{one}": None for one in range(WORLD)}}
            xc.load(found, f"{folder}/{number}", no_dist=True)
            assert found.pop("t").eq(number).all() and set(found.values()) == {number}, (number, found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = []
    for number in range(WORLD):
        child = os.fork()
        if not child:
            main(number, *sys.argv[1:])
            sys.exit(0)
        ranks.append(child)
    sys.exit(any([os.waitpid(child, 0)[1] for child in ranks]))

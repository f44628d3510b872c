"""Simulated hosts: real processes over gloo, each acting for its share of the eight devices.

The CPU runtime is one process, so every process has all eight devices; ``ShareAccess`` hides the others' shards.
``host`` is the program of one of them.
"""

import dataclasses
import logging
import sys
from pathlib import Path

from support.programs import Program, wait_for_all

TIMEOUT = 200  # seconds; a hang fails the test


def run(world, scenario, folder, dying=()):
    """Run a scenario of ``support.scenarios`` on ``world`` hosts; returns what each printed.

    Fails if any of them did, but for those that are to die.
    """
    folder = Path(folder)
    rendezvous = folder / f"rendezvous-{scenario}-{world}"
    outputs = [folder / f"output-{scenario}-{world}-{rank}.txt" for rank in range(world)]
    programs = [
        Program(host, (rank, world, str(rendezvous), scenario, str(folder)), output)
        for rank, output in enumerate(outputs)
    ]
    try:
        statuses = wait_for_all(programs, TIMEOUT)
    except TimeoutError as error:
        statuses = [str(error)] * world
    printed = [output.read_text() for output in outputs]
    failed = [
        f"host {rank} of {world} ended with {status}:\n{text}"
        for rank, (status, text) in enumerate(zip(statuses, printed))
        if (status == 0) == (rank in dying)
    ]
    assert not failed, "\n".join(failed)
    return printed


def share(devices, rank, world):
    """The devices for which a host acts, in order."""
    each = len(devices) // world
    return devices[rank * each : (rank + 1) * each]


def share_access(rank, world):
    """Access to this host's devices only."""
    import torch

    from torch_xla_ckpt.device import access_of
    from torch_xla_ckpt.device.xla import XlaAccess

    class ShareAccess(XlaAccess):
        def layout(self, tensor):
            layout = super().layout(tensor)
            own = set(share(self.devices(), rank, world))
            return dataclasses.replace(layout, shards=tuple(s for s in layout.shards if s.device in own))

        def put(self, tensor, layout, shards):
            whole = super().layout(tensor)
            others = {box: torch.zeros(layout.shard_shape, dtype=layout.dtype) for box in whole.boxes}
            super().put(tensor, whole, {**others, **shards})

    return lambda tensor: ShareAccess() if tensor.device.type == "xla" else access_of(tensor)


def host(rank, world, rendezvous, scenario, folder):
    """Act as one host: run a scenario in this process."""
    import torch.distributed as dist

    from support.scenarios import async_saves, cooperation, exports, manager, per_rank, save_load

    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(name)s: %(message)s")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    modules = (save_load, async_saves, manager, per_rank, exports, cooperation)
    getattr(next(module for module in modules if hasattr(module, scenario)), scenario)(rank, world, folder)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()

"""Simulated hosts: real processes over gloo, each acting for its share of the eight devices.

The CPU runtime is one process, so every process has all eight devices; ``ShareAccess`` hides the others' shards.
Run as a program, this module is one host: ``python -m support.hosts RANK WORLD RENDEZVOUS SCENARIO FOLDER``.
"""

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path

from support.paths import environment

TIMEOUT = 200  # seconds; a hang fails the test


def run(world, scenario, folder, dying=()):
    """Run a scenario of ``support.scenarios`` on ``world`` hosts; returns what each printed.

    Fails if any of them did, but for those that are to die.
    """
    rendezvous = Path(folder) / f"rendezvous-{scenario}-{world}"
    command = [sys.executable, "-m", "support.hosts"]
    hosts = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(rendezvous), scenario, str(folder)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [host.communicate(timeout=TIMEOUT)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    failed = [
        f"host {rank} of {world}:\n{text}"
        for rank, (host, text) in enumerate(zip(hosts, said))
        if (host.returncode == 0) == (rank in dying)
    ]
    assert not failed, "\n".join(failed)
    return said


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


def main():
    rank, world, rendezvous, scenario, folder = sys.argv[1:]
    import torch.distributed as dist

    from support.scenarios import async_saves, manager, per_rank, save_load

    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(name)s: %(message)s")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world))
    modules = (save_load, async_saves, manager, per_rank)
    run = next(getattr(module, scenario) for module in modules if hasattr(module, scenario))
    run(int(rank), int(world), folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

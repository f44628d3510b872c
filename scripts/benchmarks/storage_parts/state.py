"""The state of ``scripts/benchmarks/storage``: tensors sharded over eight virtual devices, with their values."""

from __future__ import annotations

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The stock reader copies with torch's threads. On two cores, two threads gain nothing for 64 MiB tensors. They wait for
# each other at every copy while other work runs. One thread gives the stock reader its best time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla import _XLAC

# torch and torch_xla log these warnings whenever their planners run.
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(_xla)?\.")
warnings.filterwarnings("ignore", "TypedStorage is deprecated")

xr.use_spmd()

TENSORS = 16
MIB = 1 << 20
State = dict[str, torch.Tensor]
Pieces = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Sharding:
    """A mesh of the eight devices, and a partition spec."""

    mesh: tuple[int, int]
    spec: tuple[str | None, str | None] = ("x", "y")


ROWS = Sharding((8, 1), ("x", None))
COLUMNS = Sharding((8, 1), (None, "x"))


class Data:
    """The values of the tensors: random float32 in host memory.

    Args:
        nbytes: size of all tensors together in bytes, a power of two.

    Attributes:
        largest: size of the largest tensor in bytes; all tensors have the same size.
    """

    def __init__(self, nbytes: int):
        exponent = int(math.log2(nbytes // TENSORS // 4))
        self.shape = 1 << -(-exponent // 2), 1 << exponent // 2
        if math.prod(self.shape) * TENSORS * 4 != nbytes or min(self.shape) < 8:
            raise SystemExit("--size must be a power of two and at least 4 KiB")
        self.nbytes = nbytes
        self.largest = nbytes // TENSORS
        generator = torch.Generator().manual_seed(0)
        self.tensors = {f"layers.{n}.weight": torch.rand(self.shape, generator=generator) for n in range(TENSORS)}

    def on_devices(self, sharding: Sharding) -> State:
        mesh = xs.Mesh(np.arange(8), sharding.mesh, ("x", "y"))
        state = {key: tensor.to(torch_xla.device()) for key, tensor in self.tensors.items()}
        for tensor in state.values():
            xs.mark_sharding(tensor, mesh, sharding.spec)
        settle()
        return state

    def check(self, state: State) -> None:
        """Compare every shard on every device with the expected values.

        Raises:
            SystemExit: a shard differs.
        """
        for key, tensor in state.items():
            (held,) = _XLAC._get_local_shards([tensor])
            shards = {device: shard for shard, device in held}
            for device, region in regions(tensor):
                if not torch.equal(shards[device], self.tensors[key][region]):
                    raise SystemExit(f"{key} was loaded wrong on {device}")

    def check_host(self, state: Mapping[str, torch.Tensor]) -> None:
        for key, tensor in self.tensors.items():
            if not torch.equal(state[key], tensor):
                raise SystemExit(f"{key} was saved wrong")

    def pieces(self, state: State) -> dict[str, Pieces]:
        """Return, by key, the contiguous host tensor that each device must hold."""
        return {
            key: [(device, self.tensors[key][region].contiguous()) for device, region in regions(tensor)]
            for key, tensor in state.items()
        }


def regions(tensor: torch.Tensor) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """Yield each device with the region of the tensor that it holds."""
    ((*places,),) = _XLAC._get_local_shard_replica_and_indices([tensor])
    for device, (_, region) in zip(_XLAC._xla_get_runtime_devices(), places):
        yield device, tuple(region)


def settle() -> None:
    """Wait until the devices are idle."""
    torch_xla.sync()
    xm.wait_device_ops()


def fetch(state: State) -> None:
    """Copy every shard to the host, one tensor at a time."""
    for tensor in state.values():
        _XLAC._get_local_shards([tensor])


def put(state: State, pieces: Mapping[str, Pieces]) -> None:
    """Put each device's shards on the device."""
    for key, tensor in state.items():
        _XLAC._load_local_shards(tensor, [data for _, data in pieces[key]], [device for device, _ in pieces[key]])
    settle()


def spoil(state: State) -> None:
    """Overwrite every shard with other values, so that only a load can restore them."""
    for tensor in state.values():
        devices, (region, *_) = zip(*regions(tensor))
        other = torch.full([part.stop - part.start for part in region], -1.0)
        _XLAC._load_local_shards(tensor, [other] * len(devices), list(devices))
    settle()

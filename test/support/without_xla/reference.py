"""A state that every process can make for itself, on any torch, and compare with what it read.

Imports only torch and what comes with it: the workers in this folder run where there is neither torch_xla nor
torch_xla_ckpt.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.tensor as dtensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

# Processes of a worker.
RANKS = 2
# How a dimension is cut: by no mesh axis, by one, or by several.
Cut = int | tuple[int, ...] | None


@dataclass(frozen=True)
class Item:
    """A tensor of the state.

    Args:
        shape, dtype: of the whole tensor.
        cuts: for each dimension the numbers of the mesh axes that cut it (axes the mesh lacks cut nothing), or None
            to leave the tensor unmarked.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    cuts: tuple[Cut, ...] | None = None


ITEMS = {
    "model.tiled": Item((16, 8), cuts=(0, 1)),
    "model.tiled_the_other_way": Item((16, 8), cuts=(1, 0)),
    "model.one_dimension_over_all_axes": Item((24, 3), cuts=((0, 1, 2), None)),
    "model.partially_replicated": Item((12, 6), cuts=(0, None)),
    "model.partially_replicated_columns": Item((6, 12), cuts=(None, 1)),
    "model.replicated": Item((5, 3), cuts=(None, None)),
    "model.unmarked": Item((7, 2)),
    "model.padded": Item((13, 7), cuts=(0, 1)),
    "model.padded_and_partially_replicated": Item((11, 5), cuts=(None, 0)),
    "model.three_dimensions": Item((5, 6, 7), cuts=(0, 2, 1)),
    "model.shorter_than_its_axis": Item((3,), cuts=((0, 1),)),
    "model.scalar": Item(()),
    "model.replicated_scalar": Item((), cuts=()),
    "model.empty": Item((0, 4)),
    "model.empty_and_sharded": Item((8, 0), cuts=(0, None)),
    "optim.step": Item((), torch.int64),
    "optim.list.0": Item((9, 4), torch.bfloat16, (0, None)),
    "optim.list.1.deep": Item((17, 6), torch.bfloat16, (0, 1)),
    "optim.state.7.exp_avg": Item((8, 3), torch.float64, (1, None)),
    **{
        f"dtypes.{dtype}".replace("torch.", ""): Item((10, 6), dtype, (0, 1))
        for dtype in (
            *(torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
            *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.bool),
        )
    },
    "pair.0": Item((6, 6), cuts=(0, 1)),
    "pair.1": Item((5,), torch.bfloat16, cuts=(0,)),
}
OBJECTS = {
    "numpy_scalar": np.float64(0.1),
    "numpy_array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "when": datetime.datetime(2024, 2, 29, 23, 59, 58, 1, tzinfo=datetime.timezone.utc),
    "epoch": 3,
    "big": 2**70,
    "name": "run/7 \N{GREEK SMALL LETTER ALPHA}",
    "nothing": None,
    "betas": [0.9, 0.999],
    "a tuple": (1, "two", 3.0),
}


def state(make: Callable[[str], Any], objects: dict[str, Any]) -> dict[str, Any]:
    """The state dict, with ``make(key)`` for each tensor: nested dicts and lists, integer keys, a tuple of tensors."""
    flat = {part: {k.partition(".")[2]: make(k) for k in ITEMS if k.startswith(part)} for part in ("model", "dtypes")}
    return {
        **flat,
        "optim": {
            "step": make("optim.step"),
            "list": [make("optim.list.0"), {"deep": make("optim.list.1.deep")}],
            "state": {7: {"exp_avg": make("optim.state.7.exp_avg")}},
        },
        "pair": (make("pair.0"), make("pair.1")),
        "objects": dict(objects),
    }


def full(key: str) -> torch.Tensor:
    """The item's data: bits that depend on nothing but the key, so NaNs, infinities and denormals too."""
    item = ITEMS[key]
    nbytes = math.prod(item.shape) * item.dtype.itemsize
    raw = torch.tensor(list(hashlib.shake_256(key.encode()).digest(nbytes)), dtype=torch.uint8)
    if item.dtype == torch.bool:
        return (raw % 2).bool().reshape(item.shape)
    data = raw.view(item.dtype).reshape(item.shape)
    # torch_xla itself changes float16 NaNs on their way to a device.
    return torch.where(data.isnan(), torch.ones_like(data), data) if item.dtype == torch.float16 else data


def zeros(key: str) -> torch.Tensor:
    """A plain target for the item."""
    return torch.zeros(ITEMS[key].shape, dtype=ITEMS[key].dtype)


def zeros_on(mesh: DeviceMesh, dim: int) -> Callable[[str], torch.Tensor]:
    """Makes DTensor targets cut along ``dim`` (the last one where a tensor has fewer)."""

    def make(key: str) -> torch.Tensor:
        shape = ITEMS[key].shape
        placement = Shard(min(dim, len(shape) - 1)) if shape else Replicate()
        return dtensor.zeros(shape, dtype=ITEMS[key].dtype, device_mesh=mesh, placements=[placement])

    return make


EXPECTED = state(full, OBJECTS)
NO_OBJECTS = dict.fromkeys(OBJECTS, "to be loaded")


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where ``found`` is not ``expected`` bit for bit, one line each. A DTensor is compared by its local part."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            return [f"{path or 'the state'}: expected {list(expected)}, found {_shown(found)}"]
        return [line for key in expected for line in differences(found[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, list | tuple):
        if type(found) is not type(expected) or len(found) != len(expected):
            return [f"{path}: expected {len(expected)} entries, found {_shown(found)}"]
        entries = enumerate(zip(found, expected))
        return [line for number, (f, e) in entries for line in differences(f, e, f"{path}.{number}")]
    if isinstance(expected, torch.Tensor):
        return _tensor_differences(found, expected, path)
    if type(found) is not type(expected) or not np.array_equal(found, expected):
        return [f"{path}: expected {_shown(expected)}, found {_shown(found)}"]
    return []


def _tensor_differences(found: Any, expected: torch.Tensor, path: str) -> list[str]:
    if isinstance(found, DTensor):
        expected, found = local_part(expected, found), found.to_local()
    if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return [f"{path}: expected {tuple(expected.shape)}, {expected.dtype}, found {_shown(found)}"]
    unequal = (bits(found) != bits(expected)).sum()
    return [f"{path}: {unequal} of {bits(expected).numel()} bytes differ"] if unequal else []


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def local_part(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What this rank holds of a DTensor on a one-dimensional mesh, computed without DTensor."""
    (placement,) = like.placements
    if not isinstance(placement, Shard):
        return whole
    ranks, rank = like.device_mesh.size(), like.device_mesh.get_local_rank()
    step = -(-whole.shape[placement.dim] // ranks)
    index = [slice(None)] * whole.ndim
    index[placement.dim] = slice(rank * step, (rank + 1) * step)
    return whole[tuple(index)]


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {tuple(value.shape)}, {value.dtype}"
    return f"{type(value).__name__} {str(list(value) if isinstance(value, dict) else value)[:80]}"


class Net(torch.nn.Module):
    """A model whose sizes no mesh divides, for training with SPMD and with FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 13)
        self.second = torch.nn.Linear(13, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def train(net: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor, sync: Callable[[], None]) -> None:
    """Three steps."""
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
        sync()


def named_state(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state as torch.distributed.checkpoint.state_dict lays it out: optimizer state by parameter name."""
    raw = optimizer.state_dict()
    names = [name for name, _ in net.named_parameters()]
    return {
        "model": dict(net.state_dict()),
        "optim": {
            "state": {names[number]: dict(values) for number, values in raw["state"].items()},
            "param_groups": [{**g, "params": [names[number] for number in g["params"]]} for g in raw["param_groups"]],
        },
    }


class Report:
    """What a worker found, check by check, as JSON for the test that started it."""

    def __init__(self) -> None:
        self.checks: dict[str, list[str]] = {}

    @contextmanager
    def check(self, name: str) -> Iterator[list[str]]:
        """A check that passes when the list that it yields stays empty and nothing is raised."""
        found: list[str] = []
        try:
            yield found
        except (Exception, CheckpointException):
            found.append(traceback.format_exc())
        self.checks[name] = found

    def finish(self, path: Path) -> None:
        """Write the report and end the process, with a status that says whether all checks passed."""
        path.write_text(json.dumps(self.checks))
        failed = {name: found for name, found in self.checks.items() if found}
        for name, found in failed.items():
            print(f"{name}:", *found, sep="\n  ", file=sys.stderr)
        sys.exit(bool(failed))


class Hidden:
    """An import hook under which packages are not installed."""

    def __init__(self, *packages: str):
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r} (hidden by the test)", name=name)


def hide(*packages: str) -> None:
    """Make packages look as if they were not installed."""
    assert not set(packages) & sys.modules.keys(), f"{packages} have been imported already"
    sys.meta_path.insert(0, Hidden(*packages))

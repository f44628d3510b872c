"""Shardings of XLA tensors: specs that the runtime reports, marks, and partition specs on a mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch_xla import _XLAC
from torch_xla.distributed.spmd import Mesh, XLAShardedTensor

from torch_xla_ckpt.device.xla.runtime import device_count, root_device
from torch_xla_ckpt.errors import CheckpointError

_TILES = re.compile(r"devices=\[([\d,]+)\]")


def global_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the XLA tensor inside torch_xla's ``XLAShardedTensor``; other tensors as they are."""
    return tensor.global_tensor if isinstance(tensor, XLAShardedTensor) else tensor


def spec_of(tensor: torch.Tensor) -> str:
    """Return the runtime's sharding spec of a global tensor; "" if it was never marked."""
    return _XLAC._get_xla_sharding_spec(tensor)


def is_tiled(spec: str) -> bool:
    """Whether devices hold different shards under a sharding spec. Otherwise each device holds the whole tensor.

    Raises:
        CheckpointError: the sharding has no boxes, as a manual sharding.
    """
    if not spec or spec == "{replicated}":
        return False
    if _TILES.search(spec) and "manual" not in spec:
        return True
    raise CheckpointError(
        f"a tensor with the sharding {spec} has no boxes to save. Mark it with a tiled or a replicated sharding"
    )


def tiles_of(spec: str, ndim: int) -> list[int]:
    """Return the number of tiles in each of a tensor's ``ndim`` dimensions; 1 where the tensor is not cut."""
    if not is_tiled(spec):
        return [1] * ndim
    match = _TILES.search(spec)
    assert match is not None, spec
    return [int(n) for n in match[1].split(",")][:ndim]  # further numbers count replicas


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether the devices hold different shards of a tensor."""
    return tensor.device.type == "xla" and is_tiled(spec_of(global_tensor(tensor)))


def op_sharding_of(tensor: torch.Tensor) -> Any:
    """Return the runtime's sharding object of a tensor; None if every device holds the whole tensor."""
    tensor = global_tensor(tensor)
    return _XLAC._get_xla_op_sharding(tensor) if is_tiled(spec_of(tensor)) else None


def op_sharding(mesh: Any, spec: Sequence[Any], shape: torch.Size) -> Any:
    """Return the runtime's sharding object for a partition spec; None if it leaves the tensor whole.

    Raises:
        ValueError: the spec does not fit the mesh or the shape.
    """
    require_spec(mesh, spec, shape)
    if not shape.numel() or all(axis is None for axis in spec):
        return None
    return mesh.get_op_sharding(tuple(spec))


def require_spec(mesh: Any, spec: Sequence[Any], shape: Sequence[int]) -> None:
    """Check that a partition spec fits a mesh and a tensor's shape.

    Raises:
        ValueError: the spec does not fit.
    """
    names = mesh.axis_names or ()
    if len(spec) != len(shape):
        raise ValueError(f"the partition spec {tuple(spec)} has {len(spec)} entries for {len(shape)} dimensions")
    axes = [axis for entry in spec if entry is not None for axis in (entry if isinstance(entry, tuple) else (entry,))]
    for axis in axes:
        known = axis in names if isinstance(axis, str) else 0 <= axis < len(mesh.mesh_shape)
        if not known:
            raise ValueError(f"the mesh has no axis {axis!r}. Its axes are {names or len(mesh.mesh_shape)}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"the partition spec {tuple(spec)} uses an axis of the mesh twice")


def new_mesh(axes: Mapping[str, int]) -> Any:
    """Return a mesh over all devices, in the runtime's order.

    Args:
        axes: the size of each axis, by its name. One size may be -1: the number of devices that the others leave.

    Raises:
        ValueError: the sizes do not fit the number of devices.
    """
    count, sizes = device_count(), list(axes.values())
    rest = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and rest > 0 and count % rest == 0:
        sizes[sizes.index(-1)] = count // rest
    if not sizes or min(sizes) < 1 or math.prod(sizes) != count:
        raise ValueError(f"the mesh {dict(axes)} does not fit {count} devices: its sizes must multiply to {count}")
    return Mesh(np.arange(count), tuple(sizes), tuple(axes))


def upload(tensor: torch.Tensor, placement: tuple[Any, Sequence[Any]] | None) -> torch.Tensor:
    """Return a copy of a host tensor on the devices. Each device gets its shard only.

    Args:
        tensor: the host tensor.
        placement: mesh and partition spec; None puts the whole tensor on each device.

    Raises:
        ValueError: the spec does not fit the mesh or the shape.
    """
    host = tensor.detach().contiguous()
    sharding = None
    if placement is not None and op_sharding(*placement, host.shape) is not None:
        mesh, spec = placement
        # torch_xla's ``ShardingSpec`` does not know that a mesh may have more axes than a tensor has dimensions.
        sharding = _XLAC.XlaShardingSpec(host, *mesh._get_op_sharding_args(tuple(spec)), False)
    (uploaded,) = _XLAC._xla_tensors_from_aten([host], [str(root_device())], [sharding])
    return uploaded


def make(shape: torch.Size, dtype: torch.dtype, op_sharding: Any) -> torch.Tensor:
    """Return a new tensor of zeros, already sharded. The next sync computes each device's shard only."""
    tensor = torch.zeros(shape, dtype=dtype, device="xla")
    apply(tensor, op_sharding)
    return tensor


def apply(tensor: torch.Tensor, op_sharding: Any) -> None:
    """Mark a global tensor with the runtime's sharding object; None leaves it unmarked."""
    if op_sharding is not None:
        _XLAC._xla_mark_sharding(tensor, op_sharding)


def mark(tensor: torch.Tensor, mesh: Any, spec: Sequence[Any]) -> None:
    """Shard a tensor that is whole on every device.

    Raises:
        ValueError: the spec does not fit the mesh or the shape.
    """
    sharding = op_sharding(mesh, spec, tensor.shape)
    if sharding is not None:
        forget_replication(tensor)
        apply(tensor, sharding)


def forget_replication(tensor: torch.Tensor) -> None:
    """Allow marking a tensor that the compiler has replicated."""
    if spec_of(tensor):
        _XLAC._xla_clear_sharding(tensor)

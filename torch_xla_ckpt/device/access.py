"""The access to each kind of tensor, and where new tensors are created."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_xla_ckpt.device import host, lazy
from torch_xla_ckpt.device.snapshot import Snapshot, SnapshotAccess
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import TensorAccess

_SNAPSHOTS = SnapshotAccess()
_HOST = host.HostAccess()

Placement = str | torch.device | torch.Tensor | tuple[Any, tuple[Any, ...]]
"""Where to create a tensor: a device, a tensor to imitate, or a (mesh, partition spec) pair."""


def access_of(tensor: torch.Tensor) -> TensorAccess:
    """Return the access for a tensor."""
    if type(tensor) is Snapshot:
        return _SNAPSHOTS
    return lazy.xla.XlaAccess() if tensor.device.type == "xla" else _HOST


def require_kind(tensor: torch.Tensor) -> None:
    """Check that a tensor is of a kind that can be saved and loaded. It may be on the meta device.

    Raises:
        CheckpointError: the tensor is quantized, nested, sparse, a wrapper of other tensors, or has partial placements.
    """
    if tensor.device.type not in ("xla", "meta"):
        host.require_kind(tensor)


def require_target(tensor: torch.Tensor) -> None:
    """Check that data can be loaded into a tensor in place.

    Raises:
        CheckpointError: several elements share memory, so that the tensor cannot hold the saved values.
    """
    if tensor.device.type == "xla":
        overlaps = lazy.xla.overlaps_itself(tensor)
    else:
        overlaps = type(tensor) is not Snapshot and host.overlaps_itself(tensor)
    if overlaps:
        raise CheckpointError(
            "several elements of the target share the same memory (as after expand), so the target cannot hold the "
            "saved values. Nothing was loaded. Load into tensor.clone()"
        )


def alias_of(tensor: torch.Tensor) -> Hashable:
    """Return an identity that tensors share if they are the same elements in the same order, such as tied weights."""
    if tensor.device.type == "xla":
        return lazy.xla.alias_of(tensor)
    if tensor.device.type == "meta":
        # Meta tensors have no memory, but those that share elements share a storage.
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(tensor) is Snapshot or not local.numel() or local.device.type == "meta":
        return id(tensor)
    local = host.memory_of(local)
    return local.device, local.data_ptr(), local.shape, local.stride(), local.dtype


def data_changed(tensor: torch.Tensor) -> None:
    """Tell autograd that the data of a tensor in host memory was replaced."""
    host.data_changed(tensor)


def require_place(placement: Placement | None, shape: torch.Size) -> None:
    """Check that a tensor of a shape can be created as ``placement`` says.

    Raises:
        ValueError: a partition spec does not fit the mesh or the shape.
    """
    if isinstance(placement, tuple):
        mesh, spec = placement
        lazy.xla.require_spec(mesh, spec, shape)


def make(shape: torch.Size, dtype: torch.dtype, placement: Placement | None) -> torch.Tensor:
    """Create a tensor that will be loaded. It is on its devices and sharded already, or in host memory.

    Args:
        shape, dtype: shape and dtype of the tensor.
        placement: where to create it. A tensor to imitate gives its device and, if it has the same shape, its sharding.
            None: host memory.

    Raises:
        ValueError: a partition spec does not fit the mesh or the shape.
    """
    if placement is None:
        return torch.empty(shape, dtype=dtype)
    if isinstance(placement, tuple):
        mesh, spec = placement
        return lazy.xla.make(shape, dtype, lazy.xla.op_sharding(mesh, spec, shape))
    if isinstance(placement, torch.Tensor):
        return _make_like(placement, shape, dtype)
    device = torch.device(placement)
    if device.type == "xla":
        return lazy.xla.make(shape, dtype, None)
    return torch.empty(shape, dtype=dtype, device=device)


def _make_like(like: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if like.device.type == "xla":
        return lazy.xla.make(shape, dtype, lazy.xla.op_sharding_of(like) if like.shape == shape else None)
    if isinstance(like, DTensor) and like.shape == shape:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=like.device)

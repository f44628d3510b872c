"""The interface between planners and devices."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_xla_ckpt.device import lazy
from torch_xla_ckpt.device.snapshot import Snapshot, SnapshotAccess
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import TensorAccess

_SNAPSHOTS = SnapshotAccess()

Placement = str | torch.device | torch.Tensor | tuple[Any, tuple[Any, ...]]
"""Where a tensor is to be: on a device, like another tensor, or as (mesh, partition spec) says."""


def access_of(tensor: torch.Tensor) -> TensorAccess:
    """The access for ``tensor``."""
    return _SNAPSHOTS if type(tensor) is Snapshot else _access(tensor.device.type)


@lru_cache
def _access(device_type: str) -> TensorAccess:
    if device_type == "xla":
        return lazy.xla.XlaAccess()
    from torch_xla_ckpt.device.host import HostAccess

    return HostAccess()


def require_kind(tensor: torch.Tensor) -> None:
    """Show that a tensor is of a kind that can be saved and loaded; it may be on the meta device.

    Raises:
        CheckpointError: it is quantized, nested, sparse, a wrapper of other tensors, or has partial placements.
    """
    if tensor.device.type not in ("xla", "meta"):
        from torch_xla_ckpt.device import host

        host.require_kind(tensor)


def require_target(tensor: torch.Tensor) -> None:
    """Show that data can be loaded into a tensor in place.

    Raises:
        CheckpointError: several of its elements share a place in memory, so that it cannot hold what was saved.
    """
    if tensor.device.type == "xla":
        overlaps = lazy.xla.overlaps_itself(tensor)
    else:
        from torch_xla_ckpt.device import host

        overlaps = type(tensor) is not Snapshot and host.overlaps_itself(tensor)
    if overlaps:
        raise CheckpointError(
            "several elements of the target share one place in memory (as after expand), so that it cannot hold the "
            "saved values. Nothing was loaded. Load into tensor.clone()"
        )


def alias_of(tensor: torch.Tensor) -> Hashable:
    """An identity that tensors share if they are the same data in the same order, such as tied weights."""
    if tensor.device.type == "xla":
        return lazy.xla.alias_of(tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(tensor) is Snapshot or not local.numel():
        return id(tensor)
    from torch_xla_ckpt.device import host

    local = host.memory_of(local)
    return local.device, local.data_ptr(), local.shape, local.stride(), local.dtype


def data_changed(tensor: torch.Tensor) -> None:
    """Let autograd know that the data of a tensor in host memory was replaced behind its back."""
    from torch_xla_ckpt.device import host

    host.data_changed(tensor)


def require_place(place: Placement | None, shape: torch.Size) -> None:
    """Show that a tensor of a shape can be made at ``place``.

    Raises:
        ValueError: a spec does not fit the mesh or the shape.
    """
    if isinstance(place, tuple):
        mesh, spec = place
        lazy.xla.require_spec(mesh, spec, shape)


def make(shape: torch.Size, dtype: torch.dtype, place: Placement | None) -> torch.Tensor:
    """A new tensor that is about to be loaded: on its devices and sharded already, or in host memory.

    Args:
        shape, dtype: its own.
        place: where. A tensor to be like lends its device and, if it has the same shape, its sharding. Default: host
            memory.

    Raises:
        ValueError: a spec does not fit the mesh or the shape.
    """
    if place is None:
        return torch.empty(shape, dtype=dtype)
    if isinstance(place, tuple):
        mesh, spec = place
        return lazy.xla.make(shape, dtype, lazy.xla.op_sharding(mesh, spec, shape))
    if not isinstance(place, torch.Tensor):
        device = torch.device(place)
        if device.type == "xla":
            return lazy.xla.make(shape, dtype, None)
        return torch.empty(shape, dtype=dtype, device=device)
    if place.device.type == "xla":
        return lazy.xla.make(shape, dtype, lazy.xla.op_sharding_of(place) if place.shape == shape else None)
    if isinstance(place, DTensor) and place.shape == shape:
        return torch.zeros_like(place, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=place.device)

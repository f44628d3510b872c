"""The interface between planners and devices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from torch_xla_ckpt.device.snapshot import Snapshot, SnapshotAccess
from torch_xla_ckpt.layout import Box, TensorLayout

_SNAPSHOTS = SnapshotAccess()

Placement = str | torch.device | torch.Tensor | tuple[Any, tuple[Any, ...]]
"""Where a tensor is to be: on a device, like another tensor, or as (mesh, partition spec) says."""


class TensorAccess(Protocol):
    """Reads and writes the local shards of one kind of tensor."""

    def settle(self) -> None:
        """Start and await all pending computation, so that layouts are final and data can be fetched."""

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        """What this process holds of ``tensor``. Moves no data."""

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        """The data of each distinct box of a part on the host, without padding. It may share memory with the tensor."""

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        """What fetching a part adds to host memory, in bytes."""

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """This process's part of ``tensor`` as a host tensor that shares its memory; None if there is no such."""

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        """Replace the tensor's data in place.

        ``shards`` has for each box of the layout one host tensor of the layout's shard shape, the box's elements
        first and padding after them; replicas of a box share it.
        """


def access_of(tensor: torch.Tensor) -> TensorAccess:
    """The access for ``tensor``."""
    return _SNAPSHOTS if type(tensor) is Snapshot else _access(tensor.device.type)


@lru_cache
def _access(device_type: str) -> TensorAccess:
    if device_type == "xla":
        from torch_xla_ckpt.device.xla import XlaAccess

        return XlaAccess()
    from torch_xla_ckpt.device.host import HostAccess

    return HostAccess()


def require_place(place: Placement | None, shape: torch.Size) -> None:
    """Show that a tensor of a shape can be made at ``place``.

    Raises:
        ValueError: a spec does not fit the mesh or the shape.
    """
    if isinstance(place, tuple):
        from torch_xla_ckpt.device import xla

        mesh, spec = place
        xla.require_spec(mesh, spec, shape)


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
        from torch_xla_ckpt.device import xla

        mesh, spec = place
        return xla.make(shape, dtype, xla.op_sharding(mesh, spec, shape))
    if not isinstance(place, torch.Tensor):
        device = torch.device(place)
        if device.type == "xla":
            from torch_xla_ckpt.device import xla

            return xla.make(shape, dtype, None)
        return torch.empty(shape, dtype=dtype, device=device)
    if place.device.type == "xla":
        from torch_xla_ckpt.device import xla

        return xla.make(shape, dtype, xla.op_sharding_of(place) if place.shape == shape else None)
    if isinstance(place, DTensor) and place.shape == shape:
        return torch.zeros_like(place, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=place.device)

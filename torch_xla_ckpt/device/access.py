"""The interface between planners and devices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import torch

from torch_xla_ckpt.layout import Box, TensorLayout


class TensorAccess(Protocol):
    """Reads and writes the local shards of one kind of tensor."""

    def settle(self) -> None:
        """Start and await all pending computation, so that layouts are final and data can be fetched."""

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        """What this process holds of ``tensor``. Moves no data."""

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout) -> Mapping[Box, torch.Tensor]:
        """The data of each distinct box on the host, without padding. It may share memory with the tensor."""

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """This process's part of ``tensor`` as a host tensor that shares its memory; None if there is no such."""

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        """Replace the tensor's data in place.

        ``shards`` has for each box of the layout one host tensor of the layout's shard shape, the box's elements
        first and padding after them; replicas of a box share it.
        """


def access_of(tensor: torch.Tensor) -> TensorAccess:
    """The access for ``tensor``."""
    return _access(tensor.device.type)


@lru_cache
def _access(device_type: str) -> TensorAccess:
    if device_type == "xla":
        from torch_xla_ckpt.device.xla import XlaAccess

        return XlaAccess()
    from torch_xla_ckpt.device.host import HostAccess

    return HostAccess()

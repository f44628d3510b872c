"""Layouts: the shards of a tensor that one process holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_xla_ckpt.layout.box import Box
from torch_xla_ckpt.runtime import lazy_property


@dataclass(frozen=True)
class Shard:
    """The shard of a tensor on one device.

    Args:
        box: the region of the tensor, without padding.
        device: name of the device.
        part: number of the part that the shard is fetched with; default 0. Only large snapshots have several parts.
    """

    box: Box
    device: str
    part: int = 0


@dataclass(frozen=True)
class TensorLayout:
    """The shards of a global tensor that this process can read and write.

    Shards of other processes are not listed. DCP's coordinator learns them from the gathered plans, which also works
    for tensors that torch_xla did not shard.

    Args:
        shape: shape of the global tensor.
        dtype: dtype of the elements.
        shards: one shard for each device of this process, in the runtime's order. If the tensor has several parts, one
            for each device and part.
        shard_shape: shape of each shard on its device, with padding.
        sharding: description of the sharding, for people.
        identical: whether all processes that hold a box are known to hold the same data, as replicas do. Then each may
            write a part of the box.

    Raises:
        ValueError: a shard leaves the tensor, or does not fit the shard shape.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    shard_shape: tuple[int, ...]
    sharding: str
    identical: bool

    def __post_init__(self) -> None:
        whole = Box.whole(self.shape)
        for shard in self.shards:
            fits = all(n <= padded for n, padded in zip(shard.box.sizes, self.shard_shape))
            if not whole.contains(shard.box) or not fits:
                raise ValueError(
                    f"shard {shard.box} on {shard.device} does not fit a tensor of shape {self.shape} "
                    f"in shards of shape {self.shard_shape}"
                )

    @lazy_property
    def boxes(self) -> tuple[Box, ...]:
        """The distinct boxes of this process's shards, without empty ones."""
        return tuple(dict.fromkeys(shard.box for shard in self.shards if shard.box.volume))

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct boxes, without padding."""
        return sum(box.volume for box in self.boxes) * self.dtype.itemsize

    @lazy_property
    def parts(self) -> dict[Box, int]:
        """The number of the part that each distinct box belongs to."""
        return {shard.box: shard.part for shard in reversed(self.shards) if shard.box.volume}

    def part_of(self, box: Box) -> int:
        """Return the number of the part that holds ``box``, which must be inside one of the distinct boxes."""
        part = self.parts.get(box)
        return next(n for outer, n in self.parts.items() if outer.contains(box)) if part is None else part

"""What one process holds of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import torch

from torch_xla_ckpt.layout.box import Box

_T = TypeVar("_T")


class _Lazy(Generic[_T]):
    """``functools.cached_property`` without its lock, which before Python 3.12 all instances share.

    A child that is forked while another thread computes the property would wait for that lock for ever.
    """

    def __init__(self, compute: Callable[[Any], _T]):
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> _Lazy[_T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self._compute.__name__] = self._compute(instance)
        return value


@dataclass(frozen=True)
class Shard:
    """What one device holds.

    Args:
        box: where it lies in the tensor.
        device: its name.
        replica: which of those that hold the same box this is.
        part: shards of a part are fetched together. Only large snapshots have several parts.
    """

    box: Box
    device: str
    replica: int
    part: int = 0


@dataclass(frozen=True)
class TensorLayout:
    """The pieces of a global tensor that this process can read and write.

    Other processes' shards are not listed: who else holds a box is learnt when the plans are gathered, which also
    works for tensors that are not sharded by torch_xla.

    Args:
        shape: of the global tensor.
        dtype: of the elements.
        shards: one for each device of this process, in the runtime's order; one for each part if there are several.
        shard_shape: shape of each shard as the device holds it, with padding.
        sharding: the sharding in words, for people.
        identical: whether processes that hold the same box are known to hold the same data (replicas of one
            program), so that each may write a part of it.

    Raises:
        ValueError: a shard leaves the tensor or does not fit the shard shape.
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

    @_Lazy
    def boxes(self) -> tuple[Box, ...]:
        """The distinct boxes held here that have elements."""
        return tuple(dict.fromkeys(shard.box for shard in self.shards if shard.box.volume))

    @property
    def nbytes(self) -> int:
        """The bytes of the distinct boxes, without padding."""
        return sum(box.volume for box in self.boxes) * self.dtype.itemsize

    @_Lazy
    def parts(self) -> dict[Box, int]:
        """The part that each distinct box belongs to."""
        return {shard.box: shard.part for shard in reversed(self.shards) if shard.box.volume}

    def part_of(self, box: Box) -> int:
        """The part that holds ``box``, which is one of the distinct boxes or lies in one."""
        part = self.parts.get(box)
        return next(n for outer, n in self.parts.items() if outer.contains(box)) if part is None else part

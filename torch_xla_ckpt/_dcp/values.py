"""Values of a state dict as DCP treats them: ``Stateful`` objects, integer keys, and torch's distributed tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torch_xla_ckpt._dcp.metadata import box_of
from torch_xla_ckpt.layout import Box

_NEVER_STATEFUL = frozenset({torch.Tensor, torch.nn.Parameter, dict, list, int, float, str})


class IntegerKey(str):
    """A path element that is an integer key of a mapping.

    DCP records path elements of mappings as strings, and restores optimizer states under string keys. This type keeps
    the difference. It is pickled as a plain string, so that a checkpoint names no class of this package.
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        return str, (str.__str__(self),)


def is_stateful(value: Any) -> bool:
    """Whether DCP saves ``value.state_dict()`` instead of ``value``."""
    # An isinstance check against a protocol is slow, so the most frequent types are sorted out first.
    return type(value) not in _NEVER_STATEFUL and isinstance(value, Stateful)


def state_of(value: Any) -> Any:
    """Return what DCP saves for ``value``: its ``state_dict()`` if it is ``Stateful``, else ``value`` itself."""
    return value.state_dict() if is_stateful(value) else value


def is_sharded_tensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a ``ShardedTensor``, the class that DTensor has replaced."""
    return isinstance(tensor, ShardedTensor)


def dtensor_box(tensor: DTensor) -> Box | None:
    """Return the box of a DTensor that this rank holds; None if the rank is not in the tensor's device mesh."""
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return box_of(chunk)

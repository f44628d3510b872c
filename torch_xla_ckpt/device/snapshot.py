"""Snapshots: copies that training can no longer change, standing in a state dict for the tensors they were made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box, TensorLayout
from torch_xla_ckpt.protocols import SnapshotData


class HostCopy:
    """Shards that have been fetched already."""

    def __init__(self, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]):
        self._layout = layout
        self._shards = shards

    def layout(self) -> TensorLayout:
        return self._layout

    def fetch(self, part: int) -> Mapping[Box, torch.Tensor]:
        return self._shards

    def host_bytes(self, part: int) -> int:
        return 0


class Snapshot(torch.Tensor):
    """A tensor's shape and dtype, with its data in a ``SnapshotData``. No operation can be applied to it.

    Args:
        like: the tensor it is of.
        copy: its data.
        check: called before the data is used; raises if that must not go on.
    """

    @staticmethod
    def __new__(cls, like: torch.Tensor, copy: SnapshotData, check: Callable[[], None]) -> Snapshot:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )

    def __init__(self, like: torch.Tensor, copy: SnapshotData, check: Callable[[], None]):
        self._copy: SnapshotData | None = copy
        self._check = check

    def data_or_raise(self) -> SnapshotData:
        """The snapshot's data.

        Raises:
            CheckpointError: it has been released, or the save it was made for was given up.
        """
        self._check()
        if self._copy is None:
            raise CheckpointError("a snapshot can be saved once, by the save that it was taken for; take another")
        return self._copy

    def release(self) -> None:
        """Let the data go."""
        self._copy = None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Snapshot(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CheckpointError("a snapshot cannot leave the process that took it: save in a thread, DCP's default")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise CheckpointError("what SPMDStager has staged can only be saved with SPMDSavePlanner: pass it as planner=")


class SnapshotAccess:
    """``TensorAccess`` for snapshots."""

    def settle(self) -> None:
        """Nothing is pending on a snapshot but its copy, and a sync here would cut the graph that training builds."""

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        return _of(tensor).layout()

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        return _of(tensor).fetch(part)

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        return _of(tensor).host_bytes(part)

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        raise CheckpointError("nothing can be loaded into a snapshot")


def _of(tensor: torch.Tensor) -> SnapshotData:
    assert isinstance(tensor, Snapshot)
    return tensor.data_or_raise()

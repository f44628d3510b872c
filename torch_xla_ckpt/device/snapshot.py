"""Snapshots: copies that training cannot change, which replace the original tensors in a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box, TensorLayout
from torch_xla_ckpt.protocols import SnapshotData, TensorAccess


class HostCopy(SnapshotData):
    """The ``SnapshotData`` of one tensor in host memory: shards that were fetched already."""

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
    """A tensor without data of its own: its data is a ``SnapshotData``. No operation can be applied to it.

    Args:
        like: the original tensor, which gives shape, dtype and device.
        copy: the data.
        check: called before each use of the data. Raises if the save was given up.
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
        """Return the snapshot's data.

        Raises:
            CheckpointError: the data was released, or the snapshot's save was given up.
        """
        self._check()
        if self._copy is None:
            raise CheckpointError(
                "a snapshot can be saved once, and the save of this snapshot has ended. Stage the state again"
            )
        return self._copy

    def release(self) -> None:
        """Release the data."""
        self._copy = None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Snapshot(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CheckpointError("a snapshot cannot be sent to another process. Save in a thread, which is DCP's default")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise CheckpointError(
            "a state that SPMDStager has staged can only be saved with SPMDSavePlanner. Pass planner=SPMDSavePlanner()"
        )


class SnapshotAccess(TensorAccess):
    """``TensorAccess`` for snapshots."""

    def settle(self) -> None:
        """Do nothing: only the copy itself is pending, and a sync would cut the graph that training builds."""

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        return _of(tensor).layout()

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        return _of(tensor).fetch(part)

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        return _of(tensor).host_bytes(part)

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        raise CheckpointError("nothing can be loaded into a snapshot. Load into the original state dict")


def _of(tensor: torch.Tensor) -> SnapshotData:
    assert isinstance(tensor, Snapshot)
    return tensor.data_or_raise()

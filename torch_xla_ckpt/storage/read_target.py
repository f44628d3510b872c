"""The planner of a load, as the reading threads may call it."""

from __future__ import annotations

import io
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import LoadSink


class ReadResult(NamedTuple):
    """The answer to a read request: a filled tensor to commit, or an object's bytes."""

    request: ReadItem
    value: torch.Tensor | io.BytesIO


class ReadTarget:
    """Calls of a planner. Planners that are no ``LoadSink`` know of no threads, and get one call at a time."""

    def __init__(self, planner: LoadPlanner):
        self._planner = planner
        self.sink = planner if isinstance(planner, LoadSink) else None
        self._calling: AbstractContextManager[Any] = threading.Lock() if self.sink is None else nullcontext()

    def adopt(self, request: ReadItem, tensor: torch.Tensor) -> bool:
        """Offer the planner a tensor in the memory that was read. Return whether the planner took it."""
        if self.sink is None:
            return False
        with self._calling:
            return self.sink.adopt(request, tensor)

    def buffer(self, request: ReadItem) -> torch.Tensor:
        """Return the planner's buffer for a requested region.

        Raises:
            CheckpointError: the buffer has another shape than the region.
        """
        with self._calling:
            target = self._planner.resolve_tensor(request).detach()
        if target.shape != request.lengths:
            raise CheckpointError(
                f"cannot load {request.storage_index.fqn!r}: the planner {type(self._planner).__name__} gave a buffer "
                f"of shape {tuple(target.shape)} for a region of shape {tuple(request.lengths)}. Correct the planner"
            )
        return target

    def commit(self, result: ReadResult) -> None:
        """Hand a result to the planner."""
        with self._calling:
            if isinstance(result.value, io.BytesIO):
                self._planner.load_bytes(result.request, result.value)
            else:
                self._planner.commit_tensor(result.request, result.value)

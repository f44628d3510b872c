"""Where a load puts what it reads: a planner, as the reading threads may call it, or a sink of elements."""

from __future__ import annotations

import io
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import ElementSink, LoadSink
from torch_xla_ckpt.storage.chunk_bytes import ChunkBytes, as_bits, copy_elements


class ReadResult(NamedTuple):
    """The answer to a read request: a filled tensor to commit, or an object's bytes."""

    request: ReadItem
    value: torch.Tensor | io.BytesIO


ADOPTABLE = 64 << 10
"""Size in bytes from which a tensor is offered to the planner in the memory it was read into, instead of copied."""


def _may_fill_a_box(request: ReadItem, chunk: ChunkBytes) -> bool:
    """Whether a region is large enough to be adopted, and begins where its box begins."""
    return request.lengths.numel() * chunk.dtype.itemsize >= ADOPTABLE and not any(request.dest_offsets)


class ReadTarget(Protocol):
    """Receives what a load reads. The reading threads call ``fill``; the caller's thread calls ``commit``."""

    def buffer_bytes(self, key: str) -> int:
        """Return the bytes of host memory that a tensor's buffers take until it is complete."""

    def fill(self, request: ReadItem, chunk: ChunkBytes) -> ReadResult | None:
        """Take a region of a saved chunk. Return what is still to be committed; None for nothing."""

    def fill_from(self, request: ReadItem, tensor: torch.Tensor) -> ReadResult | None:
        """Take the elements of a host tensor of the requested shape. Return what is still to be committed."""

    def commit(self, result: ReadResult) -> None:
        """Take a result."""


class ElementTarget(ReadTarget):
    """A sink of elements, which leaves nothing to commit."""

    def __init__(self, sink: ElementSink):
        self._sink = sink

    def buffer_bytes(self, key: str) -> int:
        return self._sink.buffer_bytes(key)

    def fill(self, request: ReadItem, chunk: ChunkBytes) -> ReadResult | None:
        self._sink.take(request, chunk.region(request))
        return None

    def fill_from(self, request: ReadItem, tensor: torch.Tensor) -> ReadResult | None:
        self._sink.take(request, as_bits(tensor.resolve_conj().resolve_neg()))
        return None

    def commit(self, result: ReadResult) -> None:
        raise NotImplementedError


class PlannerTarget(ReadTarget):
    """Calls of a planner. Planners that are no ``LoadSink`` know of no threads, and get one call at a time."""

    def __init__(self, planner: LoadPlanner):
        self._planner = planner
        self._sink = planner if isinstance(planner, LoadSink) else None
        self._calling: AbstractContextManager[Any] = threading.Lock() if self._sink is None else nullcontext()

    def buffer_bytes(self, key: str) -> int:
        return 0 if self._sink is None else self._sink.buffer_bytes(key)

    def fill(self, request: ReadItem, chunk: ChunkBytes) -> ReadResult | None:
        if self._sink is not None and _may_fill_a_box(request, chunk):
            region = chunk.tensor(request)
            if region is not None and self._sink.adopt(request, region):
                return ReadResult(request, region)
        target = self._buffer(request)
        chunk.copy_region(request, target)
        return ReadResult(request, target)

    def fill_from(self, request: ReadItem, tensor: torch.Tensor) -> ReadResult | None:
        target = self._buffer(request)
        copy_elements(target, tensor)
        return ReadResult(request, target)

    def _buffer(self, request: ReadItem) -> torch.Tensor:
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
        with self._calling:
            if isinstance(result.value, io.BytesIO):
                self._planner.load_bytes(result.request, result.value)
            else:
                self._planner.commit_tensor(result.request, result.value)

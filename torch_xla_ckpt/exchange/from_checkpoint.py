"""Exports from a checkpoint: the reader reads and checks chunks, and their bytes go straight to their place."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from types import EllipsisType

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.exchange.bits import same_bits
from torch_xla_ckpt.exchange.layout import Layout, OutTensor, batches_of
from torch_xla_ckpt.exchange.local_files import LocalFiles, is_one_run
from torch_xla_ckpt.exchange.streamed_files import StreamedFiles
from torch_xla_ckpt.layout import Box, Claim, assign
from torch_xla_ckpt.planner import ReadPlans
from torch_xla_ckpt.protocols import Elements, ElementSink
from torch_xla_ckpt.state import Buffers
from torch_xla_ckpt.storage import ShardReader, as_bits

_Region = tuple[OutTensor, Box]
_Place = tuple[str, torch.Size]  # name of a tensor, and offsets of a region


class _Regions(ElementSink):
    """Puts regions of tensors together in buffers of their size.

    Args:
        regions: the regions.
        metadata: the checkpoint's metadata.
        plans: plans the reads.
        buffers: memory of regions that are done, for the next regions.
    """

    def __init__(self, regions: Sequence[_Region], metadata: Metadata, plans: ReadPlans, buffers: Buffers):
        self._boxes = {(tensor.name, torch.Size(box.offsets)): (tensor, box) for tensor, box in regions}
        self._bytes: Counter[str] = Counter()
        for tensor, box in regions:
            self._bytes[tensor.name] += box.volume * tensor.dtype.itemsize
        self._buffers = buffers
        self._lock = threading.Lock()
        self._pending: dict[_Place, int] = {}
        self._filling: dict[_Place, tuple[torch.Tensor, Elements]] = {}  # buffers, and their memory as numpy sees it
        self.items: list[ReadItem] = []
        flaws: dict[str, list[str]] = {}
        for place, (tensor, box) in self._boxes.items():
            saved = metadata.state_dict_metadata[tensor.source]
            assert isinstance(saved, TensorStorageMetadata)
            reads = plans.plan(tensor.name, tensor.source, [box] if box.volume else [], saved)
            if reads.flaws:
                flaws[tensor.source] = [str(flaw) for flaw in reads.flaws[:3]]
            self._pending[place] = len(reads.items)
            self.items += reads.items
            self.expect(place, reads.items)
        flaws |= {key: parts[:3] for key, parts in _dcp.unstored(metadata, {t.source for t, _ in regions}).items()}
        if flaws:
            raise IncompleteCheckpointError(
                "the checkpoint does not hold every element exactly once:\n  "
                + "\n  ".join(f"{key!r}: {'; '.join(parts)}" for key, parts in flaws.items())
                + "\nNothing was exported. Export another checkpoint, or leave these keys out with exclude=",
                keys=tuple(flaws),
            )

    def expect(self, place: _Place, items: Sequence[ReadItem]) -> None:
        """Prepare for the reads of a region."""

    def buffer_bytes(self, key: str) -> int:
        return self._bytes[key]

    def take(self, read_item: ReadItem, elements: Elements) -> None:
        place = _place(read_item)
        tensor, box = self._boxes[place]
        with self._lock:
            if place not in self._filling:
                data = self._buffers.empty(box.sizes, tensor.saved)
                self._filling[place] = data, as_bits(data)
            data, memory = self._filling[place]
        region = (slice(at, at + n) for at, n in zip(read_item.dest_offsets, read_item.lengths))
        into: tuple[slice | EllipsisType, ...] = (*region, ...)  # without "...", a 0-d buffer gives a copy
        np.copyto(memory[into], elements, casting="no")
        with self._lock:
            self._pending[place] -= 1
            if self._pending[place]:
                return
            del self._filling[place]
        self.complete(tensor, box, data)

    def complete(self, tensor: OutTensor, box: Box, data: torch.Tensor) -> None:
        """Take the elements of a region. Called by the thread that has read the last of them."""
        raise NotImplementedError


class _Written(_Regions):
    """Writes regions to local files. Chunks that are rows of their tensor are written from the memory that was read."""

    def __init__(self, regions: Sequence[_Region], metadata: Metadata, plans: ReadPlans, files: LocalFiles):
        # A region is put together in a buffer, or each of its reads is written alone. A mixture would leave holes.
        self._direct: set[_Place] = set()
        self._files = files
        super().__init__(regions, metadata, plans, Buffers())

    def expect(self, place: _Place, items: Sequence[ReadItem]) -> None:
        tensor, box = self._boxes[place]
        if all(is_one_run(tensor.shape, _target(box, item)) for item in items):
            self._direct.add(place)

    def take(self, read_item: ReadItem, elements: Elements) -> None:
        place = _place(read_item)
        if place in self._direct:
            self._files.write(read_item.dest_index.fqn, _target(self._boxes[place][1], read_item), elements)
        else:
            super().take(read_item, elements)

    def complete(self, tensor: OutTensor, box: Box, data: torch.Tensor) -> None:
        self._files.write(tensor.name, box, as_bits(data))


class _Kept(_Regions):
    """Keeps whole tensors in memory."""

    def __init__(self, regions: Sequence[_Region], metadata: Metadata, plans: ReadPlans, buffers: Buffers):
        super().__init__(regions, metadata, plans, buffers)
        self.done: dict[str, torch.Tensor] = {}

    def complete(self, tensor: OutTensor, box: Box, data: torch.Tensor) -> None:
        self.done[tensor.name] = data


class CheckpointSource:
    """The checkpoint that an export reads.

    Args:
        reader: reads the checkpoint.
        memory_budget: bytes of tensors that are in memory at the same time, unless one tensor is larger.
    """

    def __init__(self, reader: ShardReader, memory_budget: int):
        self._reader = reader
        self._memory_budget = memory_budget
        try:
            self.metadata = reader.read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"cannot export {reader.location}: its ranks saved without a process group, and each has metadata of "
                "its own. Nothing was written. Load it with dcp.load(..., no_dist=True) on each rank, and save it again"
            ) from error
        _ = self.metadata.state_dict_metadata  # raises now if the metadata could not be read
        self.texts = reader.texts
        self.bytes_read = 0
        self._plans = ReadPlans()

    def write_share(self, layout: Layout, files: LocalFiles, rank: int, ranks: int) -> None:
        """Write this rank's share of all tensors to local files: as many bytes as every other rank."""
        everyone = tuple(range(ranks))
        tensors = layout.tensors
        claims = [Claim(Box.whole(tensor.shape), tensor.dtype.itemsize, everyone) for tensor in tensors]
        own = [(tensors[one.claim], one.box) for one in assign(claims) if one.rank == rank]
        self._read(_Written(own, self.metadata, self._plans, files))

    def write_files(self, out: StreamedFiles) -> None:
        """Write whole files to a store. As many tensors are read together as the budget has room for."""
        buffers = Buffers()
        try:
            for batch in batches_of(out.tensors, self._memory_budget):
                sink = _Kept([(one, Box.whole(one.shape)) for one in batch], self.metadata, self._plans, buffers)
                self._read(sink)
                for tensor in batch:
                    # An empty tensor is not read.
                    out.write(tensor, sink.done.pop(tensor.name, torch.empty(tensor.shape, dtype=tensor.saved)))
        except BaseException:
            out.abandon()
            raise

    def are_equal(self, one: OutTensor, other: OutTensor) -> bool:
        """Compare the bytes of two tensors of one shape and dtype, part by part. Checksums are compared first."""
        checksums, others = self._checksums(one.source), self._checksums(other.source)
        if checksums.keys() == others.keys() and checksums != others:
            return False
        buffers = Buffers()
        rows = one.shape[0] if one.shape else 1
        step = max(1, self._memory_budget // 2 // max(1, one.nbytes // max(1, rows)))
        for first in range(0, rows, step):
            whole = Box.whole(one.shape)
            box = Box((first, *whole.offsets[1:]), (min(step, rows - first), *whole.sizes[1:])) if one.shape else whole
            sink = _Kept([(tensor, box) for tensor in (one, other)], self.metadata, self._plans, buffers)
            self._read(sink)
            if box.volume and not same_bits(sink.done[one.name], sink.done[other.name]):
                return False
        return True

    def _checksums(self, key: str) -> dict[Box, bytes | None]:
        """Return the checksums of a tensor's chunks; none if the checkpoint has no checksums."""
        manifest = self._reader.manifest
        if manifest is None:
            return {}
        saved = self.metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata)
        return {
            _dcp.box_of(chunk): manifest.stored[MetadataIndex(key, chunk.offsets)].checksums for chunk in saved.chunks
        }

    def _read(self, sink: _Regions) -> None:
        before = self._reader.stats.bytes_read
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        self._reader.read_elements(sink.items, sink)
        self.bytes_read += self._reader.stats.bytes_read - before


def _place(item: ReadItem) -> _Place:
    """Return the name and the offsets of the region that a read fills a part of."""
    assert item.dest_index.offset is not None
    return item.dest_index.fqn, item.dest_index.offset


def _target(box: Box, item: ReadItem) -> Box:
    """Return the part of the whole tensor that a read fills.

    Args:
        box: the region that the read fills a part of.
        item: the read.
    """
    return Box(tuple(at + more for at, more in zip(box.offsets, item.dest_offsets)), tuple(item.lengths))

"""Exports from a checkpoint: the reader reads and checks chunks, and their bytes go straight to their place."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.exchange.bits import same_bits
from torch_xla_ckpt.exchange.layout import Layout, OutTensor, batches_of
from torch_xla_ckpt.exchange.local_files import LocalFiles, is_one_run
from torch_xla_ckpt.exchange.streamed_files import StreamedFiles
from torch_xla_ckpt.layout import Box, Claim, assign
from torch_xla_ckpt.planner import plan_reads
from torch_xla_ckpt.protocols import LoadSink
from torch_xla_ckpt.state import Buffers
from torch_xla_ckpt.storage import ShardReader

_Region = tuple[OutTensor, Box]


class _Filled(LoadPlanner, LoadSink):
    """Receives regions of tensors in buffers of their size. Buffers are reused when regions are done."""

    def __init__(self, regions: Sequence[_Region], metadata: Metadata, buffers: Buffers):
        self._boxes = {(tensor.name, torch.Size(box.offsets)): (tensor, box) for tensor, box in regions}
        self._bytes: Counter[str] = Counter()
        for tensor, box in regions:
            self._bytes[tensor.name] += box.volume * tensor.dtype.itemsize
        self._buffers = buffers
        self._lock = threading.Lock()
        self.items: list[ReadItem] = []
        self._pending: dict[tuple[str, torch.Size], int] = {}
        self._filling: dict[tuple[str, torch.Size], torch.Tensor] = {}
        flaws: dict[str, list[str]] = {}
        for tensor, box in regions:
            saved = metadata.state_dict_metadata[tensor.source]
            assert isinstance(saved, TensorStorageMetadata)
            reads = plan_reads(tensor.name, tensor.source, [box] if box.volume else [], saved)
            if reads.flaws:
                flaws[tensor.source] = [str(flaw) for flaw in reads.flaws[:3]]
            self._pending[tensor.name, torch.Size(box.offsets)] = len(reads.items)
            self.items += reads.items
        flaws |= {key: parts[:3] for key, parts in _dcp.unstored(metadata, {t.source for t, _ in regions}).items()}
        if flaws:
            raise IncompleteCheckpointError(
                "the checkpoint does not hold every element exactly once:\n  "
                + "\n  ".join(f"{key!r}: {'; '.join(parts)}" for key, parts in flaws.items())
                + "\nNothing was exported. Export another checkpoint, or leave these keys out with exclude=",
                keys=tuple(flaws),
            )

    def buffer_bytes(self, key: str) -> int:
        return self._bytes[key]

    def adopt(self, read_item: ReadItem, tensor: torch.Tensor) -> bool:
        return False

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place = _place(read_item)
        with self._lock:
            if place not in self._filling:
                tensor, box = self._boxes[place]
                self._filling[place] = self._buffers.empty(box.sizes, tensor.dtype)
            buffer = self._filling[place]
        return buffer[tuple(slice(at, at + n) for at, n in zip(read_item.dest_offsets, read_item.lengths))]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        place = _place(read_item)
        self._pending[place] -= 1
        if not self._pending[place]:
            self.complete(*self._boxes[place], self._filling.pop(place))

    def complete(self, tensor: OutTensor, box: Box, data: torch.Tensor) -> None:
        """Take the elements of a region."""
        raise NotImplementedError

    # A storage reader calls none of these.

    def set_up_planner(self, state_dict: object, metadata: object = None, is_coordinator: bool = False) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise NotImplementedError


class _Written(_Filled):
    """Writes regions to local files. Chunks that are rows of their tensor are written from the memory that was read."""

    def __init__(self, regions: Sequence[_Region], metadata: Metadata, files: LocalFiles):
        super().__init__(regions, metadata, Buffers())
        self._files = files
        self._adopted: set[tuple[Hashable, ...]] = set()
        by_place: dict[tuple[str, torch.Size], list[ReadItem]] = {}
        for item in self.items:
            by_place.setdefault(_place(item), []).append(item)
        # A region is assembled in a buffer, or each of its reads is written alone. A mixture would leave holes.
        self._direct = {
            place
            for place, items in by_place.items()
            if all(is_one_run(self._boxes[place][0].shape, self._target(item)) for item in items)
        }

    def _target(self, item: ReadItem) -> Box:
        """Return the region of the whole tensor that a read fills."""
        _, box = self._boxes[_place(item)]
        return Box(tuple(at + more for at, more in zip(box.offsets, item.dest_offsets)), tuple(item.lengths))

    def adopt(self, read_item: ReadItem, tensor: torch.Tensor) -> bool:
        if _place(read_item) not in self._direct:
            return False
        self._files.write(read_item.dest_index.fqn, self._target(read_item), tensor)
        with self._lock:
            self._adopted.add(_region_of(read_item))
        return True

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place = _place(read_item)
        if place not in self._direct:
            return super().resolve_tensor(read_item)
        return self._buffers.empty(read_item.lengths, self._boxes[place][0].dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if _place(read_item) not in self._direct:
            super().commit_tensor(read_item, tensor)
        elif _region_of(read_item) in self._adopted:
            self._adopted.remove(_region_of(read_item))
        else:
            self._files.write(read_item.dest_index.fqn, self._target(read_item), tensor)

    def complete(self, tensor: OutTensor, box: Box, data: torch.Tensor) -> None:
        self._files.write(tensor.name, box, data)


class _Kept(_Filled):
    """Keeps whole tensors in memory."""

    def __init__(self, regions: Sequence[_Region], metadata: Metadata, buffers: Buffers):
        super().__init__(regions, metadata, buffers)
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
        self.bytes_read = 0

    def write_share(self, layout: Layout, files: LocalFiles, rank: int, ranks: int) -> None:
        """Write this rank's share of all tensors to local files: as many bytes as every other rank."""
        everyone = tuple(range(ranks))
        tensors = layout.tensors
        claims = [Claim(Box.whole(tensor.shape), tensor.dtype.itemsize, everyone) for tensor in tensors]
        own = [(tensors[one.claim], one.box) for one in assign(claims) if one.rank == rank]
        self._read(_Written(own, self.metadata, files))

    def write_files(self, out: StreamedFiles) -> None:
        """Write whole files to a store. As many tensors are read together as the budget has room for."""
        buffers = Buffers()
        try:
            for batch in batches_of(out.tensors, self._memory_budget):
                sink = _Kept([(tensor, Box.whole(tensor.shape)) for tensor in batch], self.metadata, buffers)
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
            sink = _Kept([(tensor, box) for tensor in (one, other)], self.metadata, buffers)
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

    def _read(self, sink: _Filled) -> None:
        before = self._reader.stats.bytes_read
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        self._reader.read_data(LoadPlan(sink.items), sink)
        self.bytes_read += self._reader.stats.bytes_read - before


def _place(item: ReadItem) -> tuple[str, torch.Size]:
    """Return the name and the offsets of the region that a read fills a part of."""
    assert item.dest_index.offset is not None
    return item.dest_index.fqn, item.dest_index.offset


def _region_of(item: ReadItem) -> tuple[Hashable, ...]:
    return (*_place(item), item.dest_offsets)

"""What a load reads, and in which order: saved items by key, cut into jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CorruptCheckpointError
from torch_xla_ckpt.protocols import Window
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.storage.ranges import MAX_GAP, Range, blocks_of, merged, merged_rows, ranges_of
from torch_xla_ckpt.storage.stored import BLOCK, TINY, Stored

JOB_BYTES = 32 << 20
"""Bytes of items with which a job ends, if nothing else limits it."""
_JOB_ITEMS = 1024  # items with which a job ends


@dataclass(slots=True)
class ItemRead:
    """One saved item, and the parts of it that a load needs.

    Args:
        key: the item's key in the checkpoint.
        stored: the place of the item's bytes.
        saved: DCP's metadata of the tensor; None for objects.
        shape: shape of the saved chunk; empty for objects.
        requests: DCP's orders to read regions of this item.
        needed_bytes: bytes of all requested regions.
    """

    key: str
    stored: Stored
    saved: TensorStorageMetadata | None
    shape: torch.Size
    requests: list[ReadItem] = field(default_factory=list)
    needed_bytes: int = 0

    def add(self, request: ReadItem) -> None:
        """Request one more region of the item."""
        self.requests.append(request)
        self.needed_bytes += self.stored.length if self.saved is None else request.lengths.numel() * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 1 for objects."""
        return 1 if self.saved is None else self.saved.properties.dtype.itemsize

    @property
    def is_plain_tensor(self) -> bool:
        """Whether the tensor's elements lie in the file as they lie in memory."""
        return self.stored.data is not None

    @property
    def position(self) -> tuple[str, int]:
        """File name and first byte, to sort items by."""
        return self.stored.relative_path, self.stored.offset

    def ranges(self, verify: bool, gap: int = MAX_GAP) -> list[Range]:
        """Return the byte ranges of the file to read, ascending.

        Args:
            verify: read whole blocks where the item has checksums.
            gap: bytes between two ranges up to which the ranges are read as one, where the item has no checksums.
        """
        stored = self.stored
        if stored.inline is not None:
            return []
        if verify and stored.checksums is not None and stored.extent <= BLOCK:
            return [(stored.offset, stored.offset + stored.extent)] if self.needed_bytes else []
        if stored.data is None:
            wanted = [(0, stored.length)]
        else:
            rows = [
                ranges_of(self.shape, self.itemsize, request.storage_offsets, request.lengths, gap)
                for request in self.requests
                if math.prod(request.lengths)
            ]
            first = stored.data
            wanted = [(start + first, stop + first) for start, stop in merged_rows(rows, gap)]
        if verify and stored.checksums is not None:
            return merged(stored.block(number)[:2] for number in blocks_of(wanted, BLOCK))
        return [(stored.offset + start, stored.offset + stop) for start, stop in wanted]


@dataclass(slots=True)
class KeyReads:
    """All reads for one key of the target.

    Reads of one key follow one another, so that only few tensors are incomplete at a time.

    Args:
        is_tensor: whether the key is a tensor.
        buffer_bytes: host memory in bytes that the tensor's buffers take until it is complete.
        items: the saved items to read.
        uncommitted: number of items that the planner has not received yet.
    """

    is_tensor: bool
    buffer_bytes: int
    items: list[ItemRead] = field(default_factory=list)
    uncommitted: int = 0

    @property
    def needed_bytes(self) -> int:
        """Bytes of all requested regions."""
        return sum(item.needed_bytes for item in self.items)


@dataclass
class ReadJob:
    """Items that one thread reads together.

    Args:
        items: each item with the key's reads to which it belongs.
        buffer_bytes: host memory in bytes for the buffers of the tensors whose first item is in this job.
        working_bytes: host memory in bytes that is in use only while the job runs.
        bytes_read: bytes read from files so far.
        bytes_received: bytes that other ranks read and passed on.
        round: the round in which all ranks handle these items, if they read together; else None.
    """

    items: list[tuple[KeyReads, ItemRead]] = field(default_factory=list)
    buffer_bytes: int = 0
    working_bytes: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    round: int | None = None

    @property
    def is_tiny(self) -> bool:
        """Whether reading is so little work that another thread would mostly wait for Python's lock."""
        return sum(item.needed_bytes for _, item in self.items) <= TINY * len(self.items)


@without_collector
def reads_by_key(
    requests: Sequence[ReadItem], metadata: Metadata, buffer_bytes: Callable[[str], int] | None = None
) -> list[KeyReads]:
    """Group DCP's read requests by key, in the order in which the items lie in the files.

    Args:
        requests: the requests of a load plan.
        metadata: DCP's metadata of the checkpoint.
        buffer_bytes: returns how much host memory in bytes each tensor takes. Default: none.

    Raises:
        CorruptCheckpointError: the metadata lists an item that no file holds.
    """
    by_key: dict[str, KeyReads] = {}
    items: dict[tuple[str, MetadataIndex], ItemRead] = {}
    shapes: dict[str, Callable[[torch.Size | None], torch.Size]] = {}
    for request in requests:
        key = request.dest_index.fqn
        reads = by_key.get(key)
        if reads is None:
            is_tensor = request.type is LoadItemType.TENSOR
            reads = by_key[key] = KeyReads(is_tensor, buffer_bytes(key) if buffer_bytes and is_tensor else 0)
        item = items.get((key, request.storage_index))
        if item is None:
            item = items[key, request.storage_index] = _item_read(request.storage_index, metadata, shapes)
            reads.items.append(item)
            reads.uncommitted += 1
        item.add(request)
    for reads in by_key.values():
        reads.items.sort(key=lambda item: item.position)
    return sorted(by_key.values(), key=lambda reads: reads.items[0].position)


def planned_bytes(requests: Sequence[ReadItem], metadata: Metadata) -> int:
    """Return the bytes of data files that a load with these read requests reads, if it checks what it reads."""
    items = [item for reads in reads_by_key(requests, metadata) for item in reads.items]
    windows, _ = windows_of(items, [item.ranges(True) for item in items])
    return sum(stop - start for window in windows for start, stop in window.parts)


def _item_read(
    index: MetadataIndex, metadata: Metadata, shapes: dict[str, Callable[[torch.Size | None], torch.Size]]
) -> ItemRead:
    """Return a saved item with no requests yet.

    Args:
        index: DCP's name of the item.
        metadata: DCP's metadata of the checkpoint.
        shapes: a cache of functions that return the shape of each tensor's chunk at an offset.
    """
    saved = metadata.state_dict_metadata[index.fqn]
    try:
        stored = Stored.of(metadata.storage_data[index])
    except KeyError:
        what = "the object" if index.offset is None else f"the chunk at {tuple(index.offset)}"
        raise CorruptCheckpointError(
            f"cannot read {index.fqn!r}: {what} {_dcp.NOT_STORED}. Restore from another checkpoint"
        ) from None
    if not isinstance(saved, TensorStorageMetadata):
        return ItemRead(index.fqn, stored, None, torch.Size())
    if index.fqn not in shapes:
        shapes[index.fqn] = _dcp.sizes_by_offsets(saved)
    return ItemRead(index.fqn, stored, saved, shapes[index.fqn](index.offset))


def jobs_of(reads: Sequence[KeyReads], remote: bool, job_bytes: int = JOB_BYTES) -> Iterator[ReadJob]:
    """Cut the reads into jobs, in order.

    Args:
        reads: the reads of each key.
        remote: whether the bytes of a job are held in memory while it runs. Local files are memory-mapped.
        job_bytes: bytes of items with which a job ends. From a store, a job of half of them ends with its file, and
            half more are read to the end of a file. Default: ``JOB_BYTES``.
    """
    most = job_bytes * 3 // 2 if remote else job_bytes
    job, size, file = ReadJob(), 0, ""
    for key_reads in reads:
        for item in key_reads.items:
            length = item.stored.extent if item.needed_bytes else 0
            if remote and size >= job_bytes // 2 and item.stored.relative_path != file:
                yield job
                job, size = ReadJob(), 0
            if item is key_reads.items[0]:
                job.buffer_bytes += key_reads.buffer_bytes
            file = item.stored.relative_path
            job.items.append((key_reads, item))
            size += length
            if not item.is_plain_tensor:
                job.working_bytes += 2 * length  # unpickling copies the bytes twice
            elif remote:
                job.working_bytes += length
            if size >= most or len(job.items) >= _JOB_ITEMS:
                yield job
                job, size = ReadJob(), 0
    if job.items:
        yield job


def windows_of(
    items: Sequence[ItemRead], ranges: Sequence[Sequence[Range]], gap: int = MAX_GAP
) -> tuple[list[Window], list[int]]:
    """Join the byte ranges of neighbouring items into windows.

    Args:
        items: saved items.
        ranges: for each item, the byte ranges of its file to read, ascending.
        gap: bytes between two ranges up to which the ranges are read as one.

    Returns:
        The windows, and for each item the number of its window; -1 if the item needs no bytes.
    """
    order = sorted((number for number, wanted in enumerate(ranges) if wanted), key=lambda n: items[n].position)
    windows: list[tuple[str, int, int, list[Range]]] = []
    numbers = [-1] * len(items)
    for number in order:
        name, wanted = items[number].stored.relative_path, ranges[number]
        start, stop = wanted[0][0], wanted[-1][1]
        if windows and windows[-1][0] == name and start - windows[-1][2] <= MAX_GAP:
            _, first, last, parts = windows[-1]
            parts += wanted
            windows[-1] = name, first, max(last, stop), parts
        else:
            windows.append((name, start, stop, list(wanted)))
        numbers[number] = len(windows) - 1
    return [Window(name, start, stop, tuple(merged(parts, gap))) for name, start, stop, parts in windows], numbers

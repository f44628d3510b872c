"""DCP's orders: write items of a save and read items of a load, made from keys and boxes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import IO, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType

from torch_xla_ckpt.layout import Box, BoxArray


def tensor_item(key: str, chunk: ChunkStorageMetadata, properties: TensorProperties, shape: torch.Size) -> WriteItem:
    """Return the order to write one chunk of the tensor ``key``, whose global shape is ``shape``."""
    return WriteItem(
        index=MetadataIndex(key, chunk.offsets),
        type=WriteItemType.TENSOR if chunk.sizes == shape else WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
    )


def object_item(key: str) -> WriteItem:
    """Return the order to write a value that is not a tensor."""
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)


def read_object(key: str, source: str) -> ReadItem:
    """Return the order to read the object that was saved under ``source`` for the target's ``key``."""
    nowhere = torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), nowhere, MetadataIndex(source), nowhere, nowhere)


def whole_read(key: str, source: str, saved: TensorStorageMetadata, box: Box) -> ReadItem:
    """Return the order to read ``box`` of a tensor that was saved as a single chunk.

    Args:
        key: the target's key.
        source: the key under which the tensor was saved.
        saved: the metadata of the saved tensor.
        box: the region of the global tensor to read.
    """
    offset, lengths = torch.Size(box.offsets), torch.Size(box.sizes)
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(key, offset),
        dest_offsets=torch.Size((0,) * len(lengths)),
        storage_index=MetadataIndex(source, saved.chunks[0].offsets),
        storage_offsets=offset,
        lengths=lengths,
    )


class Transfer(NamedTuple):
    """Elements that a read takes out of a saved chunk, and their place in a box of the target.

    Args:
        chunk: first index of the chunk in the saved tensor.
        into: first index in the box.
        out_of: first index in the chunk.
        lengths: number of indices in each dimension.
    """

    chunk: torch.Size
    into: torch.Size
    out_of: torch.Size
    lengths: torch.Size


def transfers(target: Box, chunks: BoxArray, parts: BoxArray) -> list[Transfer]:
    """Return the transfers that fill a box of the target.

    Transfers share equal sizes. A load can have millions of reads, and the garbage collector's time to visit their
    objects dominates planning.

    Args:
        target: the box to fill.
        chunks: the saved chunks that overlap the box.
        parts: the region shared with each of these chunks, in coordinates of the global tensor.
    """
    sizes: dict[tuple[int, ...], torch.Size] = {}

    def size(numbers: list[int]) -> torch.Size:
        key = tuple(numbers)
        found = sizes.get(key)
        if found is None:
            found = sizes[key] = torch.Size(key)
        return found

    columns = (
        chunks.starts,
        parts.starts - target.bounds[0],
        parts.starts - chunks.starts,
        parts.stops - parts.starts,
    )
    return [Transfer(*map(size, row)) for row in zip(*(column.tolist() for column in columns))]


class TensorReads:
    """Makes the orders to read one saved tensor into the boxes of its target. Orders share equal indices.

    Args:
        key: the target's key.
        source: the key under which the tensor was saved.
    """

    def __init__(self, key: str, source: str):
        self._key = key
        self._source = source
        self._indices: dict[torch.Size, MetadataIndex] = {}

    def fill(self, target: Box, moves: Iterable[Transfer]) -> list[ReadItem]:
        """Return the orders that fill a box of the target."""
        index = MetadataIndex(self._key, target.offsets)
        return [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=index,
                dest_offsets=move.into,
                storage_index=self._index(move.chunk),
                storage_offsets=move.out_of,
                lengths=move.lengths,
            )
            for move in moves
        ]

    def _index(self, chunk: torch.Size) -> MetadataIndex:
        index = self._indices.get(chunk)
        if index is None:
            index = self._indices[chunk] = MetadataIndex(self._source, chunk)
        return index


def untransformed(item: ReadItem, descriptors: Sequence[str], data: IO[bytes]) -> io.BytesIO:
    """Return an item's bytes with the extensions of DCP's writer undone, compression for example.

    Args:
        item: the order that reads the item.
        descriptors: the extensions, as the writer recorded them.
        data: the item's bytes in the file.
    """
    stream = _StorageReaderTransforms().transform_load_stream(item, descriptors, data)
    return io.BytesIO(stream.read(-1))

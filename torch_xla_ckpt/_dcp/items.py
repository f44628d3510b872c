"""DCP's orders: write items of a save and read items of a load, made from keys and boxes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import IO

import torch
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType

from torch_xla_ckpt.layout import Box, BoxArray, Integers


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


class TensorReads:
    """Makes the orders to read one saved tensor into the boxes of its target.

    Orders share equal offsets, sizes and indices. A load can have millions of orders, and the garbage collector's time
    to visit their objects dominates planning.

    Args:
        key: the target's key.
        source: the key under which the tensor was saved.
        chunks: the saved chunks.
    """

    def __init__(self, key: str, source: str, chunks: BoxArray):
        self._key = key
        self._source = source
        self._chunks = chunks
        self._indices: dict[int, MetadataIndex] = {}
        self._sizes: dict[tuple[int, ...], torch.Size] = {}

    def fill(self, target: Box, numbers: Integers, parts: BoxArray) -> list[ReadItem]:
        """Return the orders that fill a box of the target.

        Args:
            target: the box to fill.
            numbers: the chunks that overlap the box, as positions in ``chunks``.
            parts: the region shared with each of these chunks, in coordinates of the global tensor.
        """
        index = MetadataIndex(self._key, target.offsets)
        starts = self._chunks.take(numbers).starts
        columns = (
            parts.starts - target.bounds[0],
            parts.starts - starts,
            parts.stops - parts.starts,
        )
        return [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=index,
                dest_offsets=self._size(into),
                storage_index=self._index(number),
                storage_offsets=self._size(out_of),
                lengths=self._size(lengths),
            )
            for number, into, out_of, lengths in zip(numbers.tolist(), *(column.tolist() for column in columns))
        ]

    def _index(self, number: int) -> MetadataIndex:
        index = self._indices.get(number)
        if index is None:
            index = self._indices[number] = MetadataIndex(self._source, self._chunks.starts[number].tolist())
        return index

    def _size(self, numbers: list[int]) -> torch.Size:
        key = tuple(numbers)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = torch.Size(key)
        return size


def untransformed(item: ReadItem, descriptors: Sequence[str], data: IO[bytes]) -> io.BytesIO:
    """Return an item's bytes with the extensions of DCP's writer undone, compression for example.

    Args:
        item: the order that reads the item.
        descriptors: the extensions, as the writer recorded them.
        data: the item's bytes in the file.
    """
    stream = _StorageReaderTransforms().transform_load_stream(item, descriptors, data)
    return io.BytesIO(stream.read(-1))

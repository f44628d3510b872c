"""DCP's metadata: chunks and tensor properties made from boxes and layouts, and questions about saved metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormatEncoding
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_xla_ckpt._dcp.chunks import Chunks
from torch_xla_ckpt.layout import Box, BoxArray, Flaw, covers_exactly, find_flaws

__all__ = [
    "NOT_STORED",
    "CompleteStorage",
    "FlatMetadata",
    "MemoryFormatEncoding",
    "StorageInfo",
    "box_of",
    "boxes_of",
    "chunk_of",
    "cover_flaws",
    "finished",
    "geometry",
    "is_one_chunk",
    "properties",
    "size_of",
    "sizes_by_offsets",
    "storage_info",
    "unstored",
]

NOT_STORED = "is listed, but stored in no file"
"""The problem of an item that the metadata lists and that its ``storage_data`` lacks."""


class CompleteStorage(Mapping[MetadataIndex, Any]):
    """A ``storage_data`` that has an entry for every item that its metadata lists."""


class FlatMetadata(Metadata):
    """Metadata of a file that holds one model, and whose keys are those of the model's state dict."""


@lru_cache(maxsize=256)
def properties(dtype: torch.dtype, requires_grad: bool) -> TensorProperties:
    """Return DCP's record of a tensor's dtype and flags.

    Equal records are one object, which pickle writes once.
    """
    return TensorProperties(dtype=dtype, requires_grad=requires_grad)


@lru_cache(maxsize=4096)
def size_of(shape: tuple[int, ...]) -> torch.Size:
    """Return ``shape`` as a ``torch.Size``. Equal sizes are one object, which pickle writes once."""
    return torch.Size(shape)


@lru_cache(maxsize=4096)
def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return a box as DCP's chunk."""
    return ChunkStorageMetadata(offsets=size_of(box.offsets), sizes=size_of(box.sizes))


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """Return DCP's chunk as a box."""
    return _box(chunk.offsets, chunk.sizes)


@lru_cache(maxsize=4096)
def _box(offsets: torch.Size, sizes: torch.Size) -> Box:
    return Box(tuple(offsets), tuple(sizes))


def boxes_of(saved: TensorStorageMetadata) -> BoxArray:
    """Return the chunks of a saved tensor as boxes.

    Raises:
        ValueError: a chunk has another number of dimensions than the tensor.
    """
    if isinstance(saved.chunks, Chunks):
        return saved.chunks.boxes
    return BoxArray.of(((chunk.offsets, chunk.sizes) for chunk in saved.chunks), len(saved.size))


def geometry(saved: TensorStorageMetadata) -> tuple[Any, ...]:
    """Return the shape and the chunks of a saved tensor as one value that can be compared and hashed."""
    boxes = boxes_of(saved)
    return tuple(saved.size), boxes.starts.tobytes(), boxes.stops.tobytes()


def sizes_by_offsets(saved: TensorStorageMetadata) -> Callable[[torch.Size | None], torch.Size]:
    """Return a function that returns the sizes of the chunk at some offsets.

    Where there is no such chunk, it returns the sizes of the tensor.
    """
    chunks = saved.chunks
    if isinstance(chunks, Chunks):

        def find(offsets: torch.Size | None) -> torch.Size:
            number = None if offsets is None else chunks.number(offsets)
            return saved.size if number is None else chunks[number].sizes

        return find
    sizes: dict[torch.Size | None, torch.Size] = {chunk.offsets: chunk.sizes for chunk in chunks}
    return lambda offsets: sizes.get(offsets, saved.size)


def is_one_chunk(saved: TensorStorageMetadata) -> bool:
    """Whether a single chunk holds the whole saved tensor. Then no cover has to be proven."""
    if len(saved.chunks) != 1:
        return False
    chunk = saved.chunks[0]
    return chunk.sizes == saved.size and not any(chunk.offsets)


def cover_flaws(saved: TensorStorageMetadata) -> tuple[Flaw, ...]:
    """Return the regions of a saved tensor that its chunks do not cover exactly once; at most three.

    Raises:
        ValueError: a chunk has another number of dimensions than the tensor.
    """
    if is_one_chunk(saved):
        return ()
    whole, chunks = Box.whole(saved.size), boxes_of(saved)
    return () if covers_exactly(whole, chunks) else find_flaws(whole, chunks)


def unstored(metadata: Metadata, keys: Iterable[str]) -> dict[str, list[str]]:
    """Describe the chunks and objects that the metadata lists under ``keys`` but that no file holds.

    A storage writer that fails in a worker thread and still reports success leaves such a checkpoint. Some storage
    has ``storage_data`` of its own instead of DCP's mapping from items to files. That cannot be checked, and the
    result is empty.

    Returns:
        For each key that misses chunks or is a missing object, one description of each of them.
    """
    storage_data = metadata.storage_data
    if isinstance(storage_data, CompleteStorage):
        return {}
    if not isinstance(storage_data, Mapping) or not set(map(type, storage_data)) <= {MetadataIndex}:
        return {}
    stored = {(index.fqn, index.offset) for index in storage_data}
    missing: dict[str, list[str]] = {}
    for key in keys:
        saved = metadata.state_dict_metadata[key]
        if not isinstance(saved, TensorStorageMetadata):
            gone = [] if (key, None) in stored else ["the object"]
        else:
            gone = [str(box_of(chunk)) for chunk in saved.chunks if (key, chunk.offsets) not in stored]
        if gone:
            missing[key] = [f"{item} {NOT_STORED}" for item in gone]
    return missing


def finished(metadata: Metadata, storage_data: Any, storage_meta: StorageMeta) -> Metadata:
    """Return a planner's metadata, completed with the storage's data and DCP's version."""
    return dataclasses.replace(
        metadata, storage_data=storage_data, storage_meta=storage_meta, version=CURRENT_DCP_VERSION
    )


def storage_info(relative_path: str, offset: int, length: int) -> StorageInfo:
    """Return the file and byte range of an item, in the class that stock DCP pickles.

    Args:
        relative_path: the file, relative to the checkpoint's folder.
        offset: the item's first byte in the file.
        length: the item's size in bytes.
    """
    return StorageInfo(relative_path, offset, length)

"""Torch's side of torch.distributed.checkpoint (DCP): its types made from ours, and its private names.

A new torch release that moves something in DCP is this file's work.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from torch_xla_ckpt.layout import Box, BoxArray


def dtensor_box(tensor: DTensor) -> Box | None:
    """What this rank holds of a DTensor, or None when it has no place in the tensor's device mesh."""
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def box_of(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def boxes_of(saved: TensorStorageMetadata) -> BoxArray:
    """The chunks of a saved tensor.

    Raises:
        ValueError: a chunk has another number of dimensions than the tensor.
    """
    return BoxArray.of(((chunk.offsets, chunk.sizes) for chunk in saved.chunks), len(saved.size))


def tensor_item(key: str, chunk: ChunkStorageMetadata, properties: TensorProperties, shape: torch.Size) -> WriteItem:
    """The order to write one chunk of a tensor."""
    return WriteItem(
        index=MetadataIndex(key, chunk.offsets),
        type=WriteItemType.TENSOR if chunk.sizes == shape else WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
    )


def object_item(key: str) -> WriteItem:
    """The order to write something that is not a tensor."""
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)


def read_tensor(key: str, target: Box, saved: Box, shared: Box) -> ReadItem:
    """The order to copy ``shared`` (in global coordinates) from the chunk ``saved`` into the box ``target``."""
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(key, target.offsets),
        dest_offsets=torch.Size(shared.relative_to(target).offsets),
        storage_index=MetadataIndex(key, saved.offsets),
        storage_offsets=torch.Size(shared.relative_to(saved).offsets),
        lengths=torch.Size(shared.sizes),
    )


def read_object(key: str) -> ReadItem:
    """The order to read something that is not a tensor."""
    nowhere = torch.Size((0,))
    index = MetadataIndex(key)
    return ReadItem(LoadItemType.BYTE_IO, index, nowhere, index, nowhere, nowhere)

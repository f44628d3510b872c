"""Bytes of a stored chunk beside its elements: each chunk is an archive of its own, which matters for small ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.storage import Stored


def chunk_overhead(items: Iterable[ReadItem], metadata: Metadata) -> float:
    """Return the mean bytes that a stored chunk has beside its elements, over the chunks that are read.

    Args:
        items: the reads.
        metadata: DCP's metadata of the checkpoint.
    """
    chunks = {item.storage_index for item in items}
    sizes: dict[str, Callable[[torch.Size | None], torch.Size]] = {}
    extra = count = 0
    for index in chunks:
        saved = metadata.state_dict_metadata[index.fqn]
        if isinstance(saved, TensorStorageMetadata):
            if index.fqn not in sizes:
                sizes[index.fqn] = _dcp.sizes_by_offsets(saved)
            elements = math.prod(sizes[index.fqn](index.offset)) * saved.properties.dtype.itemsize
            extra += max(Stored.of(metadata.storage_data[index]).extent - elements, 0)
            count += 1
    return extra / max(count, 1)

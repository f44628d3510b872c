"""Frames: what ``torch.save`` writes around a tensor's bytes.

Stock DCP reads each item with ``torch.load``. So an item is a zip archive with a small pickle and, uncompressed, the
tensor's bytes. For one dtype and shape everything but these bytes is the same: the frame. It is made once and written
around the bytes of every such tensor. The archive's CRC-32 of the tensor's bytes stays zero, because torch does not
check it and our checksums are in the manifest.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, cast

import torch

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.formats import SparseFile
from torch_xla_ckpt.protocols import Bytes

ALIGNMENT = 64
"""Items start at multiples of this many bytes in their file; torch aligns the tensor's bytes to it within an item."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Frame:
    """What surrounds a tensor's bytes in an item.

    Args:
        head: the bytes before the tensor's.
        tail: the bytes after the tensor's.
    """

    head: bytes
    tail: bytes


def item_of(tensor: torch.Tensor) -> tuple[tuple[Bytes, ...], int | None]:
    """Return the item of a tensor.

    Returns:
        The item's bytes, as parts to be written one after the other. They share the tensor's memory where they can.
        And the position in the item where the tensor's elements begin, as they are in memory; None for a tensor that is
        more than its elements, dtype and shape (quantized, or of a subclass).

    Raises:
        CheckpointError: the tensor is sparse.
    """
    if tensor.layout != torch.strided:
        raise CheckpointError("a sparse tensor cannot be saved. Save its indices and values, or tensor.to_dense()")
    if type(tensor) not in _PLAIN or tensor.is_quantized:
        data = io.BytesIO()
        torch.save(tensor, data)
        return (data.getbuffer(),), None
    if tensor.requires_grad or tensor.device.type != "cpu":
        tensor = tensor.detach().cpu()
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    frame = frame_of(tensor.dtype, tuple(tensor.shape))
    return (frame.head, tensor.view(-1).view(torch.uint8).numpy().data, frame.tail), len(frame.head)


@lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Return the frame of tensors of a dtype and shape."""
    file = SparseFile()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], file))
    head, *tail = (data for _, data in file.written())
    return Frame(head, *tail) if tail else Frame(head, b"")

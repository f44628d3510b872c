"""The bytes of one item, as stock DCP reads them.

An item is what ``torch.save`` makes: a zip archive that holds a small pickle and, uncompressed, the tensor's bytes. For
one dtype and shape everything but these bytes is always the same, so it is made once and written around them. The
archive's CRC-32 of the tensor's bytes stays zero: torch does not check it, and our checksums are in the manifest.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, cast

import torch

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Bytes

ALIGNMENT = 64
"""Items start at multiples of this in their file; torch keeps the tensor's bytes aligned to it within an item."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Frame:
    """What surrounds a tensor's bytes."""

    head: bytes
    tail: bytes


def item_of(tensor: torch.Tensor) -> tuple[tuple[Bytes, ...], int | None]:
    """The item of a tensor, in pieces, and where in it the tensor's bytes begin as they are in memory.

    They share the tensor's memory. A tensor that is more than its bytes, dtype and shape has no such place.

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
    """The frame of every tensor of this dtype and shape."""
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], sink))
    return Frame(*sink.around_the_gap())


class _Sink:
    """A seekable file that keeps what is written, and where nothing is.

    ``skip_data`` seeks over the tensor's bytes, which may be more than fit into memory.
    """

    def __init__(self) -> None:
        self._position = 0
        self._written: list[tuple[int, bytes]] = []

    def write(self, data: Bytes) -> int:
        self._written.append((self._position, bytes(data)))
        self._position += len(data)
        return len(data)

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        self._position = position if whence == io.SEEK_SET else self._position + position
        return self._position

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        pass

    def around_the_gap(self) -> tuple[bytes, bytes]:
        """What was written before and after the one place that was skipped; all of it is before when none was."""
        sides: tuple[list[bytes], list[bytes]] = ([], [])
        end, side = 0, 0
        for position, data in self._written:
            side |= position != end
            sides[side].append(data)
            end = position + len(data)
        return b"".join(sides[0]), b"".join(sides[1])

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

ALIGNMENT = 64
"""Items start at multiples of this in their file; torch keeps the tensor's bytes aligned to it within an item."""

Bytes = bytes | memoryview


@dataclass(frozen=True)
class Frame:
    """What surrounds a tensor's bytes."""

    head: bytes
    tail: bytes


def parts_of(tensor: torch.Tensor) -> tuple[Bytes, Bytes, Bytes]:
    """The item of a tensor: the archive before its bytes, its bytes (shared with the tensor), and what follows."""
    if not _plain(tensor):
        data = io.BytesIO()
        torch.save(tensor, data)
        return data.getbuffer(), b"", b""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    frame = frame_of(tensor.dtype, tuple(tensor.shape))
    return frame.head, tensor.reshape(-1).view(torch.uint8).numpy().data, frame.tail


def data_offset(tensor: torch.Tensor) -> int | None:
    """Where a tensor's bytes begin in its item, or None when they do not lie there as they are in memory."""
    return len(frame_of(tensor.dtype, tuple(tensor.shape)).head) if _plain(tensor) else None


def _plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its bytes, dtype and shape, and nothing else."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return type(tensor) in kinds and tensor.layout == torch.strided and not tensor.is_quantized


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

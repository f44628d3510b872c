"""Archives as ``torch.save`` writes them, for values whose tensors are not in memory.

The bytes of tensors come as a stream, piece by piece. ``torch.load`` opens the archive, also memory-mapped.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import torch

_ROOT = "archive"
_ALIGNMENT = 64  # of tensors in the archive, as torch.save has it
_PADDING = 0x4246  # torch's name for an extra field of padding
_TYPED = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}
"""The type that a pickle names for the storage of each dtype. Other dtypes have untyped storages."""


@dataclass(frozen=True, eq=False)
class StreamedTensor:
    """A tensor in a value to write whose bytes come later. The same object may be in the value several times.

    Args:
        shape: the tensor's shape.
        dtype: the tensor's dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class _Storage:
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Pickler(pickle.Pickler):
    """Writes each tensor as a tensor with a storage of its own."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file, protocol=2)
        self.tensors: list[StreamedTensor | torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind, size = _TYPED.get(obj.dtype, torch.UntypedStorage), math.prod(obj.shape)
        return "storage", kind, str(obj.number), "cpu", size if obj.dtype in _TYPED else size * obj.dtype.itemsize

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (StreamedTensor, torch.Tensor)):
            return NotImplemented
        rebuild, example = torch.empty(0, dtype=obj.dtype).__reduce_ex__(2)[:2]
        shape = tuple(obj.shape)
        storage = _Storage(len(self.tensors), shape, obj.dtype)
        self.tensors.append(obj)
        stride = tuple(math.prod(size or 1 for size in shape[dim + 1 :]) for dim in range(len(shape)))
        return rebuild, (storage, 0, shape, stride, False, OrderedDict(), *example[6:])


class ArchiveWriter:
    """Writes one value as an archive.

    Args:
        value: the value. It may have ``StreamedTensor``s, and tensors in host memory.

    Attributes:
        streamed: the ``StreamedTensor``s, in the order in which their bytes must come.
    """

    def __init__(self, value: Any):
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(value)
        self._pickled = pickled.getvalue()
        self._tensors = tuple(pickler.tensors)
        self.streamed = tuple(one for one in self._tensors if isinstance(one, StreamedTensor))

    def write(self, file: IO[bytes], pieces: Iterable[memoryview]) -> None:
        """Write the archive.

        Args:
            file: an empty file. It need not be seekable.
            pieces: the bytes of ``streamed``, one tensor after the other. No piece belongs to two tensors.
        """
        stream = iter(pieces)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            self._entry(archive, "data.pkl", len(self._pickled), iter([memoryview(self._pickled)]))
            order = memoryview(sys.byteorder.encode())
            self._entry(archive, "byteorder", len(order), iter([order]))
            for number, tensor in enumerate(self._tensors):
                source = stream if isinstance(tensor, StreamedTensor) else iter([_bytes(tensor)])
                self._entry(archive, f"data/{number}", tensor.nbytes, source)
            self._entry(archive, "version", 2, iter([memoryview(b"3\n")]))

    def _entry(self, archive: zipfile.ZipFile, name: str, size: int, pieces: Iterator[memoryview]) -> None:
        entry = zipfile.ZipInfo(f"{_ROOT}/{name}", (1980, 1, 1, 0, 0, 0))
        entry.file_size, entry.compress_size, entry.CRC = size, 0, 0
        header = len(entry.FileHeader(zip64=size * 1.05 > zipfile.ZIP64_LIMIT))
        start = archive.start_dir + header + 4  # an extra field begins with its number and its length
        padding = -start % _ALIGNMENT
        entry.extra = struct.pack("<HH", _PADDING, padding) + b"Z" * padding
        with archive.open(entry, "w") as target:
            written = 0
            while written < size:
                written += target.write(next(pieces))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data

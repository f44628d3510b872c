"""Writing regions of tensors to their final place in local files."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from torch_xla_ckpt.exchange.bits import raw_bytes
from torch_xla_ckpt.exchange.layout import OutFile, OutTensor
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.protocols import Bytes

_CAST = 1 << 20  # elements that are cast at once


class LocalFiles:
    """The open files of an export, for all threads of a process.

    Args:
        folder: the folder of the files, which exist at their full size.
        files: the files.
    """

    def __init__(self, folder: Path, files: tuple[OutFile, ...]):
        self._folder = folder
        self._place: Mapping[str, tuple[OutFile, OutTensor]] = {
            tensor.name: (file, tensor) for file in files for tensor in file.tensors
        }
        self._opened: dict[str, int] = {}
        self._lock = threading.Lock()
        self.bytes_written = 0

    def tensor(self, name: str) -> OutTensor:
        """Return the tensor of a name."""
        return self._place[name][1]

    def write(self, name: str, box: Box, data: torch.Tensor) -> None:
        """Write a region of a tensor.

        Args:
            name: the tensor's name.
            box: the region.
            data: the region's elements in host memory, of any dtype.
        """
        file, tensor = self._place[name]
        descriptor = self._descriptor(file.name)
        size = tensor.dtype.itemsize
        elements = data.contiguous().reshape(-1)
        raw = memoryview(b"" if data.dtype != tensor.dtype else raw_bytes(elements))
        done = 0
        try:
            for start, stop in runs_of(tensor.shape, box):
                at, end = file.offsets[name] + start * size, done + stop - start
                for part in (raw[done * size : end * size],) if raw else _cast(elements[done:end], tensor.dtype):
                    _write_all(descriptor, part, at)
                    at += len(part)
                done = end
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._folder / file.name)) from error
        with self._lock:
            self.bytes_written += done * size

    def close(self) -> None:
        """Put everything on stable storage, and close the files."""
        try:
            for descriptor in self._opened.values():
                os.fsync(descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    def _descriptor(self, name: str) -> int:
        with self._lock:
            if name not in self._opened:
                self._opened[name] = os.open(self._folder / name, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
            return self._opened[name]


def is_one_run(shape: tuple[int, ...], box: Box) -> bool:
    """Whether the elements of a region follow one another in the whole tensor."""
    partial = [dim for dim, size in enumerate(box.sizes) if size != shape[dim]]
    return not partial or all(size == 1 for size in box.sizes[: partial[-1]])


def runs_of(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yield where each run of a region's elements starts and stops in the whole tensor, in C order."""
    if not box.volume:
        return
    inner = len(shape)  # the dimensions from here on are whole
    while inner and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    cut = max(inner - 1, 0)  # the last dimension that is cut
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(box.sizes[cut:]) if shape else 1
    starts = [sum(box.offsets[dim] * strides[dim] for dim in range(cut, len(shape)))]
    for dim in reversed(range(cut)):
        starts = [(box.offsets[dim] + row) * strides[dim] + start for row in range(box.sizes[dim]) for start in starts]
    end = None
    for start in starts:  # rows that follow one another become one run
        if end is not None and start == end[1]:
            end = (end[0], start + length)
        else:
            if end is not None:
                yield end
            end = (start, start + length)
    if end is not None:
        yield end


def _cast(elements: torch.Tensor, dtype: torch.dtype) -> Iterator[Bytes]:
    """Yield elements in another dtype, in pieces: the memory budget has no room for a copy of a large tensor."""
    for piece in elements.split(_CAST):
        yield raw_bytes(piece.to(dtype))


def _write_all(descriptor: int, data: Bytes, at: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, at)
        data, at = data[done:], at + done

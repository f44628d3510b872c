"""Writing regions of tensors to their final place in local files."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from torch_xla_ckpt.exchange.bits import raw_bytes
from torch_xla_ckpt.exchange.casting import Casts
from torch_xla_ckpt.exchange.layout import OutFile, OutTensor
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.protocols import Bytes, Elements

_CAST = 1 << 20  # elements that are cast at once


class LocalFiles:
    """The open files of an export, for all threads of a process.

    Args:
        folder: the folder of the files, which exist at their full size.
        files: the files.
        casts: casts the elements, and counts those that overflow.
    """

    def __init__(self, folder: Path, files: tuple[OutFile, ...], casts: Casts):
        self._folder = folder
        self._casts = casts
        self._place: Mapping[str, tuple[OutFile, OutTensor]] = {
            tensor.name: (file, tensor) for file in files for tensor in file.tensors
        }
        self._opened: dict[str, _OpenFile] = {}
        self._lock = threading.Lock()
        self.bytes_written = 0

    def tensor(self, name: str) -> OutTensor:
        """Return the tensor of a name."""
        return self._place[name][1]

    def write(self, name: str, box: Box, elements: Elements) -> None:
        """Write a region of a tensor.

        Args:
            name: the tensor's name.
            box: the region.
            elements: the region's elements, in the dtype of the source.
        """
        file, tensor = self._place[name]
        opened = self._open(file.name)
        size = tensor.dtype.itemsize
        flat = np.ascontiguousarray(elements).reshape(-1)
        raw = flat.view(np.uint8).data
        is_cast = tensor.saved != tensor.dtype
        done = 0
        try:
            for start, stop in runs_of(tensor.shape, box):
                at, end = file.offsets[name] + start * size, done + stop - start
                for part in self._cast(flat[done:end], tensor) if is_cast else (raw[done * size : end * size],):
                    opened.write(part, at)
                    at += len(part)
                done = end
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._folder / file.name)) from error
        with self._lock:
            self.bytes_written += done * size

    def close(self) -> None:
        """Put everything on stable storage, and close the files."""
        try:
            for opened in self._opened.values():
                os.fsync(opened.descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files."""
        while self._opened:
            os.close(self._opened.popitem()[1].descriptor)

    def _cast(self, elements: Elements, tensor: OutTensor) -> Iterator[Bytes]:
        """Yield elements in another dtype, in pieces: the memory budget has no room for a copy of a large tensor."""
        for start in range(0, len(elements), _CAST):
            piece = np.require(elements[start : start + _CAST], requirements="W")
            yield raw_bytes(self._casts.cast(torch.from_numpy(piece).view(tensor.saved), tensor))

    def _open(self, name: str) -> _OpenFile:
        with self._lock:
            if name not in self._opened:
                self._opened[name] = _OpenFile(os.open(self._folder / name, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)))
            return self._opened[name]


class _OpenFile:
    """A file that is written by one thread at a time.

    File systems let one thread at a time write to a file. The others would spin in the kernel, each on a core of its
    own that could read and check chunks.

    Args:
        descriptor: the open file.
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._lock = threading.Lock()

    def write(self, data: Bytes, at: int) -> None:
        """Write bytes at a position."""
        with self._lock:
            while data:
                done = os.pwrite(self.descriptor, data, at)
                data, at = data[done:], at + done


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

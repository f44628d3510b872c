"""Elements of a saved chunk in a buffer of file bytes, copied bit by bit."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch.distributed.checkpoint.planner import ReadItem

from torch_xla_ckpt.protocols import Elements
from torch_xla_ckpt.storage.read_plan import ItemRead

# A type of the same size for each element size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_BITS = {size: np.dtype(f"i{size}") for size in (2, 4, 8)} | {1: np.dtype(np.uint8), 16: np.dtype(np.complex128)}


class ChunkBytes:
    """A saved chunk in C order in a buffer. Bytes that no request needs may be absent.

    Args:
        item: the chunk's item.
        view: the buffer.
        offset: position of the chunk's first byte in the buffer; negative if its first bytes are absent.
    """

    def __init__(self, item: ItemRead, view: memoryview, offset: int):
        assert item.saved is not None
        self.dtype = item.saved.properties.dtype
        self.shape = item.shape
        self._view = view
        self._offset = offset
        self._bits = _NUMPY_BITS[self.dtype.itemsize]

    def copy_region(self, request: ReadItem, target: torch.Tensor) -> None:
        """Copy the requested region into a tensor of the region's shape, casting if the dtypes differ."""
        region = self.region(request)
        if _is_plain(target) and target.dtype == self.dtype:
            # numpy, because torch would start its own threads for every copy, beside the reading threads.
            np.copyto(as_bits(target), region, casting="no")
        elif target.numel():
            target.copy_(torch.from_numpy(region.copy()).view(self.dtype).reshape(target.shape))

    def tensor(self, request: ReadItem) -> torch.Tensor | None:
        """Return the requested region in the buffer's own memory, often with strides.

        None if the memory is not aligned for the dtype. Also None for a part of a chunk that is not memory-mapped,
        because the tensor would keep all of the buffer. Nobody may write to the tensor: its memory may be that of
        ``bytes``.
        """
        if request.lengths != self.shape and not isinstance(self._view.obj, mmap.mmap):
            return None
        region = self.region(request)
        if not region.flags.aligned:
            return None
        return torch.from_numpy(np.asarray(_Memory(region))).view(self.dtype)

    def region(self, request: ReadItem) -> Elements:
        """Return the requested region in the buffer's own memory, as integers of the same size."""
        if request.lengths == self.shape:
            return np.ndarray(self.shape, self._bits, self._view, self._offset)
        strides = [self.dtype.itemsize]
        for extent in reversed(self.shape[1:]):
            strides.append(strides[-1] * extent)
        strides = strides[::-1][: len(self.shape)]
        offset = self._offset + sum(n * stride for n, stride in zip(request.storage_offsets, strides))
        return np.ndarray(request.lengths, self._bits, self._view, offset, strides)


class _Memory:
    """The memory of an array, as if it may be written to: torch has no tensors that only may be read.

    Args:
        array: the array, whose memory stays as long as this object.
    """

    def __init__(self, array: Elements):
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
        self._array = array


def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a host tensor into a tensor of the same shape, casting if the dtypes differ."""
    if _is_plain(target) and _is_plain(source) and target.dtype == source.dtype:
        np.copyto(as_bits(target), as_bits(source), casting="no")
    else:
        target.copy_(source)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's host memory holds its elements as they are."""
    on_host = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return on_host and not (tensor.is_conj() or tensor.is_neg())


def as_bits(tensor: torch.Tensor) -> Elements:
    """Return a host tensor's memory as an array of integers of the same size. It must be neither a lazy conjugate nor
    a lazy negative."""
    if tensor.itemsize == 16:
        return tensor.numpy()
    return tensor.view(_BITS[tensor.itemsize]).numpy()

"""Where the elements of a tensor lie in an item of stock DCP, so that a part of it can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torch_xla_ckpt.protocols import Folder, Window
from torch_xla_ckpt.serialization import parsed_ranges, restricted
from torch_xla_ckpt.storage import Stored

_TAIL = 64 << 10  # bytes at the end of an item in a store that are read first; they hold the archive's directory


def located(folder: Folder, item: Stored, shape: Sequence[int], dtype: torch.dtype) -> Stored:
    """Return where an item lies, with the place of the tensor's elements if that can be found.

    The item is parsed as for loading. Of items in stores, only the bytes around the elements are read.

    Args:
        folder: the checkpoint's folder.
        item: where the item lies.
        shape: the chunk's shape.
        dtype: the tensor's dtype.
    """
    if item.data is not None or item.inline is not None or item.transform_descriptors or dtype is torch.bool:
        return item
    try:
        view = restricted.writable(_described(folder, item))
        tensor = restricted.load_mapped(view)
    except Exception:  # reading the item raises the right error
        return item
    if not _lies_plainly(tensor, shape, dtype):
        return item
    return item._replace(data=tensor.data_ptr() - np.frombuffer(view, np.uint8).ctypes.data)


def _described(folder: Folder, item: Stored) -> memoryview:
    """Return a view of an item with at least the bytes that describe its tensor."""
    start, stop = item.offset, item.offset + item.length
    if not folder.remote:  # a memory map reads nothing before it is looked at
        return folder.view([Window(item.relative_path, start, stop, ((start, stop),))])[0]
    parts: list[tuple[int, int]] = [(max(0, item.length - _TAIL), item.length)]
    for _ in range(3):  # the directory may begin before the tail
        absolute = tuple((start + first, start + last) for first, last in parts)
        (view,) = folder.view([Window(item.relative_path, start, stop, absolute)])
        if parts == (parts := parsed_ranges(view)):
            break
    return view


def _lies_plainly(tensor: Any, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a value is a tensor of a shape and a dtype whose elements follow one another in the file."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return False
    fits = (tuple(tensor.shape), tensor.dtype) == (tuple(shape), dtype)
    return fits and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

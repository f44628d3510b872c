"""Equality bit by bit: of the elements of two tensors, and of two objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torch_xla_ckpt.inspecting.objects import object_text

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compared(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Return the number of elements whose bits differ, and the largest absolute difference."""
    if not a.numel():
        return 0, 0.0
    first, second = _bits(a), _bits(b)
    if torch.equal(first, second):
        return 0, 0.0
    differs = first != second
    if differs.dim() > 1:
        differs = differs.any(dim=1)
    try:
        # The bits are selected, because torch selects no elements of some dtypes.
        values = [bits[differs].reshape(-1).view(a.dtype) for bits in (first, second)]
        largest = _largest_difference(*values)
    except (RuntimeError, NotImplementedError, TypeError):  # there are dtypes to compute nothing with: float4_e2m1fn_x2
        largest = math.nan
    return int(differs.sum()), largest


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference of two elements; an exact int for integers and booleans."""
    if not a.is_floating_point() and not a.is_complex():
        return _largest_distance(*(one.view(torch.uint8) if one.dtype is torch.bool else one for one in (a, b)))
    first, second = _wide(a), _wide(b)
    distance = (first - second).abs()
    distance[first == second] = 0  # infinities, and zeros of other signs
    return float(distance.max())


def _largest_distance(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the largest distance of two integers. Distances of 64-bit integers fit into unsigned ones only."""
    first, second = a.numpy(), b.numpy()
    wide = np.uint64 if first.dtype.kind == "u" else np.int64
    high, low = (choose(first, second).astype(wide).view(np.uint64) for choose in (np.maximum, np.minimum))
    return int((high - low).max())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of each element as an integer, or as two where torch has no integer of the size."""
    flat = tensor.reshape(-1)
    return flat.view(torch.int64).reshape(-1, 2) if flat.itemsize == 16 else flat.view(_BITS[flat.itemsize])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return (tensor if tensor.itemsize >= 4 else tensor.float()).double()


def equal(a: Any, b: Any) -> bool:
    """Return whether two objects of harmless types are equal, with numbers, tensors and arrays compared by their bits.

    All NaN are equal: an object's text does not tell them apart.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and compared(a.contiguous(), b.contiguous())[0] == 0
    if isinstance(a, Mapping):
        return equal(list(a), list(b)) and all(map(equal, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, (float, complex)):  # 0.0 and -0.0 differ
        return repr(a) == repr(b)
    if isinstance(a, (np.generic, np.ndarray)) and not a.dtype.hasobject:
        return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())
    try:
        return bool(a == b) or object_text(a) == object_text(b) == "nan"
    except (ValueError, TypeError):  # arrays, whose comparison is an array
        return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())

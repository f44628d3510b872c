"""Boxes of tensors with different numbers of dimensions in one array, and arrays in small types."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torch_xla_ckpt.layout import Box, Integers

AnyIntegers = npt.NDArray[np.integer[Any]]
_MANY = 1 << 18
_NARROW = tuple((kind, int(np.iinfo(kind).max)) for kind in (np.uint8, np.uint16, np.uint32))


def narrow(numbers: AnyIntegers, bounds: tuple[int, int] | None = None) -> AnyIntegers:
    """Return numbers in the smallest type that holds all of them.

    Args:
        numbers: the numbers.
        bounds: the smallest and the largest number, if they are known.
    """
    if not numbers.size:
        return numbers
    least, most = bounds or (int(numbers.min()), int(numbers.max()))
    return next((numbers.astype(kind) for kind, limit in _NARROW if least >= 0 and most <= limit), numbers)


def repeated(values: Integers, counts: Integers) -> Integers:
    """Return each value as many times as its count says.

    ``np.repeat`` holds Python's lock, for tens of milliseconds if the result is large.
    """
    total = int(counts.sum())
    if total < _MANY:
        return np.repeat(values, counts)
    values, counts = values[counts > 0], counts[counts > 0]
    steps = np.zeros(total, dtype=np.int64)
    steps[np.cumsum(counts) - counts] = np.diff(values, prepend=0)
    return np.cumsum(steps, out=steps)


def padded_row(box: Box, ndim: int) -> tuple[int, ...]:
    """Return a box as ``ndim`` offsets and ``ndim`` sizes. Dimensions that the box lacks have one index.

    Padding changes neither the order of elements nor what boxes have in common.
    """
    lacking = ndim - len(box.sizes)
    return (*box.offsets, *(0,) * lacking, *box.sizes, *(1,) * lacking)


def repadded(boxes: AnyIntegers, ndim: int) -> Integers:
    """Return boxes that were padded to fewer dimensions, padded to ``ndim`` dimensions."""
    have = boxes.shape[1] // 2
    wide = np.zeros((len(boxes), 2 * ndim), dtype=np.int64)
    wide[:, :have] = boxes[:, :have]
    wide[:, ndim : ndim + have] = boxes[:, have:]
    wide[:, ndim + have :] = 1
    return wide

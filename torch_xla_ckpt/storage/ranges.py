"""Which bytes of a file a region of a chunk lies in. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from torch_xla_ckpt.layout import Integers

MAX_GAP = 64 << 10
"""Ranges closer than this, in bytes, are read as one: asking twice costs more than reading what lies between."""

Range = tuple[int, int]


def ranges_of(shape: Sequence[int], itemsize: int, offsets: Sequence[int], sizes: Sequence[int]) -> Integers:
    """The byte ranges of a region in a contiguous array, as an (n, 2) array of starts and stops, ascending.

    Rows that lie closer than ``MAX_GAP`` share a range.

    Args:
        shape: of the array.
        itemsize: bytes of an element.
        offsets, sizes: the region, which must have elements.
    """
    if tuple(sizes) == tuple(shape):
        return np.array([[0, math.prod(sizes) * itemsize]])
    starts = np.zeros(1, dtype=np.int64)
    length = stride = itemsize
    for extent, offset, size in zip(reversed(shape), reversed(offsets), reversed(sizes)):
        # ``length`` bytes are wanted of every ``stride``, ``size`` times.
        if size == 1 or stride - length <= MAX_GAP:
            starts = starts + offset * stride
            length += (size - 1) * stride
        else:
            rows = (offset + np.arange(size, dtype=np.int64)) * stride
            starts = (rows[:, None] + starts[None, :]).reshape(-1)
        stride *= extent
    return np.stack([starts, starts + length], axis=1)


def merged(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Ranges that cover the same bytes, ascending and more than ``gap`` bytes apart."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start - result[-1][1] <= gap:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((start, stop))
    return result


def blocks_of(ranges: Iterable[Range], block: int) -> list[int]:
    """Numbers of the blocks of ``block`` bytes that the ranges touch, ascending."""
    ranges = list(ranges)
    if len(ranges) == 1:
        ((start, stop),) = ranges
        return list(range(start // block, math.ceil(stop / block)))
    return sorted({number for start, stop in ranges for number in range(start // block, math.ceil(stop / block))})

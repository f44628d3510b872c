"""Byte ranges of a file that hold a region of a saved chunk: arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from torch_xla_ckpt.layout import Integers

MAX_GAP = 64 << 10
"""Gap in bytes up to which two ranges are read as one. Two requests cost more than the bytes of the gap."""

Range = tuple[int, int]

_MANY = 64  # ranges from which numpy is faster than Python


def ranges_of(
    shape: Sequence[int], itemsize: int, offsets: Sequence[int], sizes: Sequence[int], gap: int | None = None
) -> Integers:
    """Return the byte ranges of a region in a contiguous array.

    Rows with a gap of at most ``gap`` bytes share a range.

    Args:
        shape: shape of the array.
        itemsize: bytes of one element.
        offsets: first index of the region in each dimension.
        sizes: extent of the region in each dimension. The region must not be empty.
        gap: bytes between two rows up to which they share a range. Default: ``MAX_GAP``.

    Returns:
        An (n, 2) array of starts and stops, ascending.
    """
    gap = MAX_GAP if gap is None else gap
    if tuple(sizes) == tuple(shape):
        return np.array([[0, math.prod(sizes) * itemsize]])
    starts = np.zeros(1, dtype=np.int64)
    length = stride = itemsize
    for extent, offset, size in zip(reversed(shape), reversed(offsets), reversed(sizes)):
        # The region needs the first ``length`` bytes out of every ``stride`` bytes, ``size`` times.
        if size == 1 or stride - length <= gap:
            starts = starts + offset * stride
            length += (size - 1) * stride
        else:
            rows = (offset + np.arange(size, dtype=np.int64)) * stride
            starts = (rows[:, None] + starts[None, :]).reshape(-1)
        stride *= extent
    return np.stack([starts, starts + length], axis=1)


def merged(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Return ranges that cover the same bytes, ascending, with gaps of more than ``gap`` bytes."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start - result[-1][1] <= gap:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((start, stop))
    return result


def merged_rows(rows: Sequence[Integers], gap: int) -> list[Range]:
    """Return the same as ``merged`` for many ranges, such as the rows of all boxes of a matrix that is cut by columns.

    Args:
        rows: arrays of ranges, as ``ranges_of`` returns them.
        gap: bytes between two ranges up to which the ranges are merged.
    """
    if sum(map(len, rows)) < _MANY:
        return merged([(start, stop) for part in rows for start, stop in part.tolist()], gap)
    ranges = np.concatenate(rows)
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    stops = np.maximum.accumulate(ranges[:, 1])
    ends = np.flatnonzero(ranges[1:, 0] - stops[:-1] > gap)  # the ranges before a gap
    firsts, lasts = np.append(0, ends + 1), np.append(ends, len(ranges) - 1)
    return list(zip(ranges[firsts, 0].tolist(), stops[lasts].tolist()))


def blocks_of(ranges: Iterable[Range], block: int) -> list[int]:
    """Return the numbers of the blocks that the ranges touch, ascending. A block has ``block`` bytes."""
    ranges = list(ranges)
    if len(ranges) == 1:
        ((start, stop),) = ranges
        return list(range(start // block, math.ceil(stop / block)))
    return sorted({number for start, stop in ranges for number in range(start // block, math.ceil(stop / block))})

"""Boxes: axis-aligned regions of a tensor's indices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Box:
    """A region of a global tensor, without padding.

    Args:
        offsets: first index in each dimension.
        sizes: number of indices in each dimension; a size of 0 makes the box empty.

    Raises:
        ValueError: offsets and sizes differ in length, or a number is negative.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(
                f"a box needs one size for each offset, but got the offsets {self.offsets} and the sizes {self.sizes}"
            )
        if self.sizes and (min(self.offsets) < 0 or min(self.sizes) < 0):
            raise ValueError(
                f"a box has no negative numbers, but got the offsets {self.offsets} and the sizes {self.sizes}"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(self.sizes)

    @property
    def bounds(self) -> tuple[Integers, Integers]:
        """The first index in each dimension, and the index after the last one, as arrays."""
        low = np.array(self.offsets, dtype=np.int64)
        return low, low + np.array(self.sizes, dtype=np.int64)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select this box in the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes))

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box."""
        return all(
            a <= b and b + n <= a + m for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes)
        )

    def relative_to(self, outer: Box) -> Box:
        """Return this box in the coordinates of ``outer``.

        Raises:
            ValueError: ``outer`` does not contain this box.
        """
        if not outer.contains(self):
            raise ValueError(f"the box {self} is not inside the box {outer}")
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets)), self.sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.sizes)) + "]"


@dataclass(frozen=True, eq=False)
class BoxArray:
    """Many boxes of one tensor, as two int64 arrays of shape (boxes, dimensions), for vectorised work.

    Args:
        starts: first index of each box in each dimension.
        stops: index after the last one of each box in each dimension.

    Raises:
        ValueError: the arrays differ in shape, or are not two-dimensional.
    """

    starts: Integers
    stops: Integers

    def __post_init__(self) -> None:
        if self.starts.ndim != 2 or self.starts.shape != self.stops.shape:
            raise ValueError(f"expected two arrays of one (n, d) shape, got {self.starts.shape}, {self.stops.shape}")

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], ndim: int) -> BoxArray:
        """Return the array of boxes given as (offsets, sizes) pairs.

        Args:
            pairs: offsets and sizes of each box, ``ndim`` numbers each.
            ndim: number of dimensions.

        Raises:
            ValueError: a pair has another number of dimensions.
        """
        rows = [(*offsets, *sizes) for offsets, sizes in pairs]
        if any(len(row) != 2 * ndim for row in rows):
            raise ValueError(f"a box of a {ndim}-d tensor has {ndim} offsets and {ndim} sizes")
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 2 * ndim)
        return cls(table[:, :ndim], table[:, :ndim] + table[:, ndim:])

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, numbers: Integers | slice) -> BoxArray:
        """Return the boxes at these positions."""
        return BoxArray(self.starts[numbers], self.stops[numbers])

    @property
    def ndim(self) -> int:
        return self.starts.shape[1]

    def __getitem__(self, number: int) -> Box:
        start, stop = self.starts[number].tolist(), self.stops[number].tolist()
        return Box(tuple(start), tuple(b - a for a, b in zip(start, stop)))

    def clipped(self, region: Box) -> tuple[Integers, BoxArray]:
        """Return the positions of the boxes that overlap ``region``, and their intersections with it."""
        low, high = region.bounds
        starts, stops = np.maximum(self.starts, low), np.minimum(self.stops, high)
        kept = np.flatnonzero((starts < stops).all(axis=1))
        return kept, BoxArray(starts[kept], stops[kept])

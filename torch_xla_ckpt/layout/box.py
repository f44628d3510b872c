"""Boxes: axis-aligned regions of a tensor's index space."""

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
        ValueError: the two differ in length, or a number is negative.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"a box needs one size for each offset, got {self.offsets} and {self.sizes}")
        if self.sizes and (min(self.offsets) < 0 or min(self.sizes) < 0):
            raise ValueError(f"a box has no negative offsets or sizes, got {self.offsets} and {self.sizes}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(self.sizes)

    @property
    def bounds(self) -> tuple[Integers, Integers]:
        """The first index in each dimension, and the one after the last, as arrays."""
        low = np.array(self.offsets, dtype=np.int64)
        return low, low + np.array(self.sizes, dtype=np.int64)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes))

    def intersect(self, other: Box) -> Box | None:
        """The region both boxes share, or None when they share no element."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets))
        stops = (min(a + m, b + n) for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes))
        sizes = tuple(stop - start for start, stop in zip(starts, stops))
        return Box(starts, sizes) if all(n > 0 for n in sizes) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` lies in this box."""
        return all(
            a <= b and b + n <= a + m for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes)
        )

    def relative_to(self, outer: Box) -> Box:
        """This box in the coordinates of ``outer``, which must contain it."""
        if not outer.contains(self):
            raise ValueError(f"box {self} does not lie in {outer}")
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets)), self.sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.sizes)) + "]"


@dataclass(frozen=True, eq=False)
class BoxArray:
    """Many boxes of one tensor as two int64 arrays of shape (boxes, dimensions), for vectorised work.

    Raises:
        ValueError: the arrays are not of one two-dimensional shape.
    """

    starts: Integers
    stops: Integers

    def __post_init__(self) -> None:
        if self.starts.ndim != 2 or self.starts.shape != self.stops.shape:
            raise ValueError(f"expected two arrays of one (n, d) shape, got {self.starts.shape}, {self.stops.shape}")

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], ndim: int) -> BoxArray:
        """From (offsets, sizes) pairs of ``ndim`` numbers each.

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
        """The boxes at these positions."""
        return BoxArray(self.starts[numbers], self.stops[numbers])

    @property
    def ndim(self) -> int:
        return self.starts.shape[1]

    def __getitem__(self, number: int) -> Box:
        start, stop = self.starts[number].tolist(), self.stops[number].tolist()
        return Box(tuple(start), tuple(b - a for a, b in zip(start, stop)))

    def clipped(self, region: Box) -> tuple[Integers, BoxArray]:
        """Which boxes share elements with ``region``, and the parts of them that lie in it."""
        low, high = region.bounds
        starts, stops = np.maximum(self.starts, low), np.minimum(self.stops, high)
        kept = np.flatnonzero((starts < stops).all(axis=1))
        return kept, BoxArray(starts[kept], stops[kept])

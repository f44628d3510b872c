"""The exact cover test: do boxes cover a region exactly once, and if not, which part is missing or doubled?

The test looks only at corners. Write the region and every box as a function that is 1 inside and 0 outside. The
boxes cover the region exactly once if and only if their functions add up to the region's. Taking the difference
along each dimension in turn loses nothing (it can be summed back) and leaves of a d-dimensional box only its 2**d
corners, with alternating signs. So the cover is exact if and only if, corner for corner, the signs add up: one sort
of 2**d * n integers, whichever dimension is split and however irregularly.

The same idea, summed instead of differenced, is Crow's summed-area table (SIGGRAPH 1984).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torch_xla_ckpt.layout.box import Box, BoxArray, Integers


@dataclass(frozen=True)
class Flaw:
    """A region that a set of boxes does not cover exactly once.

    Args:
        box: the region.
        kind: "missing": no box covers it. "doubled": several boxes cover it. "outside": the box leaves the tensor.
    """

    box: Box
    kind: Literal["missing", "doubled", "outside"]

    def __str__(self) -> str:
        return f"{self.box} is {self.kind}"


def covers_exactly(region: Box, boxes: BoxArray) -> bool:
    """Whether every element of ``region`` is in exactly one box, and no box leaves the region.

    Empty boxes are ignored. Takes O(n log n) time for n boxes.
    """
    low, high = region.bounds
    if len(boxes) == 1 and region.volume:
        return bool((boxes.starts[0] == low).all() and (boxes.stops[0] == high).all())
    solid = (boxes.starts < boxes.stops).all(axis=1)
    starts, stops = boxes.starts[solid], boxes.stops[solid]
    if region.volume == 0:
        return len(starts) == 0
    if (starts < low).any() or (stops > high).any():
        return False
    # A dimension that every box spans in full decides nothing. Leaving it out halves the number of corners.
    cut = ((starts != low) | (stops != high)).any(axis=0)
    if len(starts) == 0 or not cut.any():
        return len(starts) == 1
    return _corners_cancel(starts[:, cut], stops[:, cut], low[cut], high[cut])


def find_flaws(region: Box, boxes: BoxArray, limit: int = 3) -> tuple[Flaw, ...]:
    """Return the first ``limit`` regions that are not covered exactly once; empty if the cover is exact."""
    low, high = region.bounds
    leaves = ((boxes.starts < low) | (boxes.stops > high)).any(axis=1) & (boxes.starts < boxes.stops).all(axis=1)
    outside = (Flaw(boxes[n], "outside") for n in np.flatnonzero(leaves).tolist())
    return tuple(itertools.islice(itertools.chain(outside, _search(region, boxes)), limit))


def _search(region: Box, boxes: BoxArray) -> Iterator[Flaw]:
    """Halve the region at an edge of a box, until each part is covered, missing or doubled as a whole."""
    _, inside = boxes.clipped(region)
    if covers_exactly(region, inside):
        return
    if len(inside) == 0:
        yield Flaw(region, "missing")
        return
    cut = _middle_edge(region, inside)
    if cut is None:
        yield Flaw(region, "doubled")
        return
    dim, at = cut
    below = at - region.offsets[dim]
    yield from _search(_resized(region, dim, region.offsets[dim], below), inside)
    yield from _search(_resized(region, dim, at, region.sizes[dim] - below), inside)


def _middle_edge(region: Box, boxes: BoxArray) -> tuple[int, int] | None:
    """Return the dimension with the most distinct edges strictly inside the region, and the median edge."""
    best: tuple[int, Integers] | None = None
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes)):
        edges = np.unique(np.concatenate([boxes.starts[:, dim], boxes.stops[:, dim]]))
        edges = edges[(edges > offset) & (edges < offset + size)]
        if len(edges) and (best is None or len(edges) > len(best[1])):
            best = dim, edges
    return None if best is None else (best[0], int(best[1][len(best[1]) // 2]))


def _resized(box: Box, dim: int, offset: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = offset, size
    return Box(tuple(offsets), tuple(sizes))


def _corners_cancel(starts: Integers, stops: Integers, low: Integers, high: Integers) -> bool:
    """Whether the signed corners of the boxes equal the signed corners of the region [low, high)."""
    ndim = starts.shape[1]
    # The region is added as one more box with the opposite sign. Then all signs must add up to zero.
    starts, stops = np.vstack([starts, low]) - low, np.vstack([stops, high]) - low
    sign = np.ones(len(starts), dtype=np.int64)
    sign[-1] = -1
    corners, signs = [], []
    for ends in itertools.product((0, 1), repeat=ndim):
        corners.append(np.where(ends, stops, starts))
        signs.append(sign if sum(ends) % 2 == 0 else -sign)
    order, first = _grouped(np.concatenate(corners), (high - low + 1).tolist())
    return not np.add.reduceat(np.concatenate(signs)[order], first).any()


def _grouped(points: Integers, extents: list[int]) -> tuple[Integers, Integers]:
    """Return an order that puts equal points side by side, and the position of each group's first point."""
    if math.prod(extents) < 2**63:
        strides = np.array([math.prod(extents[dim + 1 :]) for dim in range(len(extents))], dtype=np.int64)
        codes = points @ strides
        order = np.argsort(codes, kind="stable")
        change = codes[order][1:] != codes[order][:-1]
    else:
        order = np.lexsort(points.T)
        change = (points[order][1:] != points[order][:-1]).any(axis=1)
    return order, np.concatenate([[0], np.flatnonzero(change) + 1])

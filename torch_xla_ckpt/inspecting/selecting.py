"""Reading what slices select, in pieces of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torch_xla_ckpt.inspecting.reading import PIECE_BYTES, Values
from torch_xla_ckpt.inspecting.slices import Region
from torch_xla_ckpt.layout import Box

_SPARSE = 1 << 20  # bytes between two selected indices from which each index is read by itself


class Piece(NamedTuple):
    """Selected elements.

    Args:
        place: where they belong in the result, which still has the dimensions that an index selects.
        elements: the elements.
    """

    place: tuple[slice, ...]
    elements: torch.Tensor


def selected(values: Values, key: str, region: Region) -> torch.Tensor:
    """Return the elements that slices of a tensor select.

    Args:
        values: the checkpoint's values.
        key: the tensor's key.
        region: the slices.
    """
    dtype = values.saved_tensor(key).properties.dtype
    if region.box.volume * dtype.itemsize <= PIECE_BYTES:
        result = values.tensor(key, region.box)[tuple(slice(None, None, step) for step in region.steps)]
    else:
        result = torch.empty(region.sizes, dtype=dtype)
        for piece in selected_pieces(values, key, region):
            result[piece.place] = piece.elements
    return result[tuple(0 if dim in region.dropped else slice(None) for dim in range(len(region.steps)))]


def selected_pieces(values: Values, key: str, region: Region) -> Iterator[Piece]:
    """Yield the elements that slices of a tensor select, piece by piece."""
    itemsize = values.saved_tensor(key).properties.dtype.itemsize
    for box in _boxes(region, itemsize):
        for piece in values.pieces(key, box):
            inside = [
                _progression(*numbers) for numbers in zip(region.box.offsets, region.steps, piece.offsets, piece.sizes)
            ]
            if all(first < n for (_, first), n in zip(inside, piece.sizes)):
                elements = values.tensor(key, piece)[
                    tuple(slice(first, None, step) for (_, first), step in zip(inside, region.steps))
                ]
                place = tuple(slice(at, at + n) for (at, _), n in zip(inside, elements.shape))
                yield Piece(place, elements)


def _progression(offset: int, step: int, start: int, size: int) -> tuple[int, int]:
    """Return the number of the first selected index that is not before ``start``, and its distance from ``start``."""
    number = math.ceil((start - offset) / step) if step > 1 else start - offset
    return number, offset + number * step - start


def _boxes(region: Region, itemsize: int) -> Iterator[Box]:
    """Cut a region's box where steps are so large that the bytes between two selected indices need not be read."""
    box = region.box
    for dim, step in enumerate(region.steps):
        if step > 1 and step * math.prod(box.sizes[dim + 1 :]) * itemsize >= _SPARSE:
            for start in range(box.offsets[dim], box.offsets[dim] + box.sizes[dim], step):
                offsets = (*box.offsets[:dim], start, *box.offsets[dim + 1 :])
                sizes = (*box.sizes[:dim], 1, *box.sizes[dim + 1 :])
                steps = (*region.steps[:dim], 1, *region.steps[dim + 1 :])
                yield from _boxes(Region(Box(offsets, sizes), steps, region.dropped), itemsize)
            return
    yield box

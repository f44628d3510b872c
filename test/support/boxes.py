"""Boxes made by hypothesis, and what they cover, by counting elements."""

import numpy as np
from hypothesis import strategies as st

from torch_xla_ckpt.layout import Box, BoxArray


def array(boxes, ndim):
    return BoxArray.of(((box.offsets, box.sizes) for box in boxes), ndim)


def count(shape, boxes):
    """How many boxes hold each element."""
    held = np.zeros(shape, dtype=int)
    for box in boxes:
        held[box.slices] += 1
    return held


@st.composite
def shapes(draw, least=0):
    return tuple(draw(st.lists(st.integers(least, 6), max_size=4)))


@st.composite
def boxes_in(draw, shape):
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def tilings(draw):
    """A box and pieces of it made by cutting one piece after another anywhere, so not only grids."""
    whole = Box.whole(draw(shapes(least=1)))
    pieces = [whole]
    for _ in range(draw(st.integers(0, 8))):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dims = [dim for dim, n in enumerate(piece.sizes) if n > 1]
        if not dims:
            pieces.append(piece)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, piece.sizes[dim] - 1))
        for offset, size in ((0, at), (at, piece.sizes[dim] - at)):
            offsets, sizes = list(piece.offsets), list(piece.sizes)
            offsets[dim] += offset
            sizes[dim] = size
            pieces.append(Box(tuple(offsets), tuple(sizes)))
    return whole, draw(st.permutations(pieces))

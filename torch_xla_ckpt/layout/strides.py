"""Do two elements of a strided tensor lie at the same place in memory?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def elements_overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two different indices of a strided tensor name one element of its storage.

    Args:
        sizes: number of indices in each dimension.
        strides: for each dimension, the distance of neighbours in elements.
    """
    if 0 in sizes:
        return False
    dims = sorted((stride, size) for size, stride in zip(sizes, strides) if size > 1)
    reach = 0  # distance from the first element to the last one of the dimensions seen so far
    for stride, size in dims:
        if stride == 0:
            return True
        if stride <= reach:
            return _collide(dims)
        reach += stride * (size - 1)
    return False


def _collide(dims: Sequence[tuple[int, int]]) -> bool:
    """Compare all elements. Only tensors whose dimensions interleave need this, and they are rare."""
    places = np.zeros(1, dtype=np.int64)
    for stride, size in dims:
        places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return len(np.unique(places)) < len(places)

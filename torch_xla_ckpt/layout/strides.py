"""The test whether two elements of a strided tensor share memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def elements_overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two different indices of a strided tensor refer to the same element of its storage.

    Args:
        sizes: number of indices in each dimension.
        strides: distance of neighbours in each dimension, in elements.
    """
    if 0 in sizes:
        return False
    dims = sorted((stride, size) for size, stride in zip(sizes, strides) if size > 1)
    reach = 0  # distance from the first to the last element, in the dimensions seen so far
    for stride, size in dims:
        if stride == 0:
            return True
        if stride <= reach:
            return _collide(dims)
        reach += stride * (size - 1)
    return False


def _collide(dims: Sequence[tuple[int, int]]) -> bool:
    """Compare the addresses of all elements. Only the rare tensors whose dimensions interleave need this."""
    addresses = np.zeros(1, dtype=np.int64)
    for stride, size in dims:
        addresses = (addresses[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return len(np.unique(addresses)) < len(addresses)

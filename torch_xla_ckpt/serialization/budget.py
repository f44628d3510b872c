"""The cost limit of a pickle: what its values may cost in time and memory, in proportion to its size.

A few opcodes can describe a tuple of 2**100 leaves, or copy one list again and again. So the bytes that calls and
hashes go through are counted.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch

from torch_xla_ckpt.serialization.table import Refused

# Bytes that every pickle may cost, and bytes for each byte of its data.
_FREE = 1 << 26
_TIMES = 16
_LEVELS = 10_000  # of tuples, whose hash recurses in C
MAX_EXPANDED = 1 << 28
"""Bytes up to which a tensor with strides of 0 may be larger than its storage and still be used in computations."""

_CONTAINERS = frozenset({list, dict, set, frozenset, bytearray, collections.OrderedDict, collections.Counter})


class CostBudget:
    """Counts the bytes that functions may copy, hash or compute with.

    Args:
        data_bytes: bytes of the pickle and of the data that belongs to it.
    """

    def __init__(self, data_bytes: int):
        self._left = _FREE + _TIMES * data_bytes

    def charge(self, value: Any) -> None:
        """Count the bytes of a value that is given to a function or hashed.

        Raises:
            Refused: the budget is spent, or the value is nested too deep.
        """
        level, left, depth = [value], self._left, 0
        while level and left >= 0 and depth < _LEVELS:
            inner: list[Any] = []
            for one in level:
                kind = type(one)
                if kind is tuple:
                    left -= len(one)
                    inner += one
                elif kind is str or kind is bytes:
                    left -= len(one)
                elif kind in _CONTAINERS:
                    left -= 8 * len(one)
                elif kind is int:
                    left -= one.bit_length() >> 3
                elif isinstance(one, torch.Tensor) and one.layout == torch.strided and one.device.type == "cpu":
                    most = max(MAX_EXPANDED, one.untyped_storage().nbytes())
                    left -= min(one.numel() * one.itemsize, most) >> 6
                elif isinstance(one, np.ndarray):
                    left -= one.nbytes
                if left < 0:
                    break
            level, depth = inner, depth + 1
        self._left = left
        if left < 0:
            raise Refused("its pickle builds values from too many references to the same data")
        if level:
            raise Refused("its pickle nests a key, or the arguments of a type, too deep")

"""Elements of tensors and arrays, compared by their bits and shown in errors."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_LONGEST_TEXT = 80
"""Characters of a value that an error shows."""


class Found(NamedTuple):
    """Where two blocks of elements differ.

    Args:
        number: how many elements differ.
        at: the index of the first of them.
        flat: its number in row-major order.
    """

    number: int
    at: tuple[int, ...]
    flat: int


def first_difference(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> Found | None:
    """Compare elements, given as rows of bytes in row-major order; None if all are the same."""
    if np.array_equal(a, b):
        return None
    differing = np.flatnonzero((a != b).any(axis=1))
    first = int(differing[0])
    return Found(len(differing), tuple(int(n) for n in np.unravel_index(first, shape)), first)


def rows_of_tensor(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a host tensor, one row for each element."""
    bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
    flat = bits.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().reshape(tensor.numel(), tensor.itemsize)  # type: ignore[no-any-return]


def rows_of_array(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array, one row for each element."""
    return np.frombuffer(array.tobytes(), dtype=np.uint8).reshape(array.size, array.itemsize)


def element(tensor: torch.Tensor, flat: int) -> Any:
    """Return an element as a Python number; None if its dtype has none."""
    try:
        return tensor.reshape(-1)[flat].item()
    except (RuntimeError, NotImplementedError):
        return None


def element_text(found: Found, size: int, values: str) -> str:
    at = f" at {list(found.at)}" if found.at else ""
    if size == 1:
        return values
    return f"{found.number:,} of {size:,} elements differ, first{at}: {values}"


def two_values(a: Any, b: Any, bits_a: bytes, bits_b: bytes) -> str:
    """Return two values in words, with their bits where the values look the same.

    Args:
        a, b: the values.
        bits_a, bits_b: their bytes, lowest first.
    """
    if repr(a) != repr(b):
        return f"{shown(a)} and {shown(b)}"
    return f"{shown(a)} with bits 0x{bits_a[::-1].hex()} and 0x{bits_b[::-1].hex()}"


def bits_of(number: complex) -> bytes:
    return struct.pack("<dd", number.real, number.imag)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."

"""Columns of integers as JSON: one number if all are equal, else text that holds them in as few bytes as possible."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.storage.stored import CHECKSUM_BYTES

_WIDTHS = (1, 2, 4, 8)


def encoded_column(numbers: _dcp.AnyIntegers, bounds: tuple[int, int] | None = None) -> bytes:
    """Return integers that are not negative as JSON. Text is base64 of little-endian integers of one width.

    Args:
        numbers: the integers, at least one.
        bounds: the smallest and the largest of them, if they are known.
    """
    least, most = bounds or (int(numbers.min()), int(numbers.max()))
    if least == most:
        return b"%d" % most
    small = _dcp.narrow(numbers, (least, most))
    return _encoded(small.astype(small.dtype.newbyteorder("<"), copy=False).tobytes())


def encoded_checksums(checksums: Integers) -> bytes:
    """Return checksums as JSON: base64 of 8 bytes each, as they are in memory: the most significant first."""
    return _encoded(checksums.tobytes())


def _encoded(data: bytes) -> bytes:
    return b'"%s"' % binascii.b2a_base64(data, newline=False)


def decoded_checksums(text: Any) -> Integers:
    """Return checksums from JSON.

    Raises:
        ValueError: the text is no checksums.
    """
    data = _decoded(text)
    if len(data) % CHECKSUM_BYTES:
        raise ValueError("checksums of an impossible length")
    return np.frombuffer(data, dtype=np.int64)


def decoded_column(value: Any, count: int, limit: int = 1 << 62) -> Integers:
    """Return a column from JSON.

    Args:
        value: the column.
        count: the number of integers that it must have. The caller has made sure that there is memory for them.
        limit: the integers must be smaller.

    Raises:
        ValueError: the value is no column of so many integers.
    """
    if type(value) is int:
        if not 0 <= value < limit:
            raise ValueError("a column with an impossible number")
        return np.full(count, value, dtype=np.int64)
    data = _decoded(value)
    width = len(data) // count if count else 0
    if width not in _WIDTHS or width * count != len(data):
        raise ValueError("a column of another length")
    numbers = np.frombuffer(data, dtype=f"<u{width}")
    if int(numbers.max()) >= limit:
        raise ValueError("a column with an impossible number")
    return numbers.astype(np.int64)


def _decoded(text: Any) -> bytes:
    if type(text) is not str:
        raise ValueError("a column that is neither a number nor text")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a column that is no base64 ({error})") from error

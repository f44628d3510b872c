"""Digests of objects, to find values that differ between ranks.

Equal objects of common types have equal digests: numbers, strings, dicts in any order, lists, tuples, sets, arrays,
host tensors, dataclasses, enums. For other types the pickled bytes are compared, which can differ for equal objects.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import pathlib
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
import xxhash

_BY_REPR = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...)),
    *(torch.dtype, torch.device, torch.Size, np.generic, np.dtype),
    *(
        datetime.date,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        uuid.UUID,
        pathlib.PurePath,
    ),
)
_EXACT_TYPES = frozenset(_BY_REPR)  # the types of most values; a lookup is faster than isinstance


def digest(value: Any, pickled: Callable[[], bytes]) -> bytes:
    """Return 16 bytes that are the same for equal objects.

    Args:
        value: the object.
        pickled: returns the object's pickled bytes. Called only for types that this module does not know.
    """
    try:
        return _digest(value)
    except (_UnknownType, RecursionError):
        return _hash(b"pickled", [pickled()])


class _UnknownType(Exception):
    """The object, or a value inside it, has a type that this module cannot take apart."""


def _digest(value: Any) -> bytes:
    kind = type(value)
    if kind in _EXACT_TYPES or isinstance(value, _BY_REPR):
        return _hash(_name(value), [repr(value).encode(errors="surrogatepass")])
    if isinstance(value, enum.Enum):
        return _hash(_name(value), [value.name.encode()])
    if isinstance(value, (list, tuple, deque)):
        return _hash(_name(value), map(_digest, value))
    if isinstance(value, Mapping):
        return _hash(_name(value), sorted(_digest(key) + _digest(entry) for key, entry in value.items()))
    if isinstance(value, Set):
        return _hash(_name(value), sorted(map(_digest, value)))
    if isinstance(value, bytearray):
        return _hash(_name(value), [bytes(value)])
    if isinstance(value, torch.Tensor):
        return _digest_of_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return _hash(_name(value), [_digest(value.tolist())])
    if isinstance(value, np.ndarray):
        return _hash(_name(value), [f"{value.dtype.str}{value.shape}".encode(), value.tobytes()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _hash(_name(value), [_digest(parts)])
    raise _UnknownType


def _digest_of_tensor(tensor: torch.Tensor) -> bytes:
    kind = f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device.type}".encode()
    if tensor.device.type != "cpu":  # fetching the data would cost more than a warning is worth
        return _hash(b"tensor", [kind])
    if tensor.layout != torch.strided or tensor.is_quantized or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise _UnknownType
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return _hash(b"tensor", [kind, flat.numpy().tobytes()])


def _name(value: Any) -> bytes:
    return type(value).__qualname__.encode()


def _hash(name: bytes, parts: Iterable[bytes]) -> bytes:
    state = xxhash.xxh3_128(name)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return bytes(state.digest())

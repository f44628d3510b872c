"""Values of torch that both tensors and DCP's metadata consist of: sizes, dtypes and layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_xla_ckpt.serialization.table import CheckedFunction, Refused

LIMIT = 1 << 62
"""Limit of sizes, strides, offsets and byte counts: sums of two of them still fit into 64 bits."""

_LAYOUTS = {
    str(layout): layout
    for layout in (
        *(torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc),
        *(getattr(torch, name) for name in ("jagged",) if hasattr(torch, name)),
    )
}


def checked_sizes(value: Any) -> tuple[int, ...]:
    """Return sizes or strides as a tuple.

    Raises:
        Refused: the value is no tuple of integers from 0 to ``LIMIT``.
    """
    if type(value) not in (tuple, torch.Size) or not all(type(n) is int and 0 <= n < LIMIT for n in value):
        raise Refused("its pickle gives a tensor an impossible shape")
    return tuple(value)


def _size(*sizes: Any) -> torch.Size:
    (numbers,) = sizes or ((),)
    return torch.Size(checked_sizes(numbers))


def _layout(name: Any) -> torch.layout:
    if type(name) is not str or name not in _LAYOUTS:
        raise Refused("its pickle names an unknown layout")
    return _LAYOUTS[name]


VALUES: Mapping[str, Any] = {
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": CheckedFunction("torch.serialization._get_layout", _layout),
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
CALLS: Mapping[type, Callable[..., Any]] = {torch.Size: _size}

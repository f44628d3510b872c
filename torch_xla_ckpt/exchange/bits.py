"""Host tensors as bytes."""

from __future__ import annotations

import torch

from torch_xla_ckpt.protocols import Bytes


def raw_bytes(data: torch.Tensor) -> Bytes:
    """Return the bytes of a host tensor in C order. They share its memory if it is contiguous."""
    return _bits(data).numpy().data if data.numel() else b""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two host tensors of one shape and dtype have the same bytes, which NaNs may have too."""
    return torch.equal(_bits(one), _bits(other))


def _bits(data: torch.Tensor) -> torch.Tensor:
    return data.detach().contiguous().reshape(-1).view(torch.uint8)

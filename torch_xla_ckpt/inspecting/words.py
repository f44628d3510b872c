"""Shapes and values of a checkpoint in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def shape_words(shape: Sequence[int]) -> str:
    """Return a shape: "16x8", or "scalar"."""
    return "x".join(map(str, shape)) or "scalar"


def tensor_words(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return a tensor's dtype and shape: "float32 16x8"."""
    return f"{str(dtype).removeprefix('torch.')} {shape_words(shape)}"


def entry_words(entry: Any) -> str:
    """Return DCP's entry for a key in words: "float32 16x8", "object", or "" if there is none."""
    if entry is None:
        return ""
    return tensor_words(entry.properties.dtype, entry.size) if isinstance(entry, TensorStorageMetadata) else "object"

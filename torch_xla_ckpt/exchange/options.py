"""The options of an export, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torch_xla_ckpt.exchange.layout import OutTensor, out_dtype
from torch_xla_ckpt.exchange.selection import Entry, Rename, Selection, select
from torch_xla_ckpt.storage import Location

Format = Literal["safetensors", "torch"]
_FORMATS = ("safetensors", "torch")


@dataclass(frozen=True)
class Options:
    """The options of ``export``, whose docstring explains them.

    Raises:
        ValueError: an option has a wrong value.
        TypeError: an option has a wrong type.
    """

    location: Location
    key: str | None
    format: Format
    max_shard_bytes: int
    dtype: torch.dtype | None
    rename: Rename | None
    only: tuple[str, ...]
    exclude: tuple[str, ...]
    config_from: Any
    memory_budget: int
    storage_options: Mapping[str, Any] | None
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(f"format={self.format!r}: choose one of {', '.join(map(repr, _FORMATS))}")
        for name in ("max_shard_bytes", "memory_budget"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: pass the number of bytes as an int, such as 5 << 30 for 5 GiB")
        if self.max_shard_bytes <= 0 or self.memory_budget <= 0:
            raise ValueError("max_shard_bytes and memory_budget must be positive")
        if self.dtype is not None and not (self.dtype.is_floating_point and self.dtype.itemsize > 1):
            raise ValueError(f"dtype={self.dtype}: tensors are cast to floating-point dtypes of 16 bits or more only")
        if self.is_file and self.config_from is not None:
            raise ValueError(
                f"config_from= writes files beside the weights, and the export to {self.location} writes one file. "
                "Nothing was written. Pass the path of a folder to make, or leave config_from= out"
            )

    @staticmethod
    def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
        """Return a dtype that the caller gave by itself or by its name, such as "bfloat16".

        Raises:
            ValueError: torch has no dtype of this name.
            TypeError: the value is neither a dtype nor a name.
        """
        found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
        if found is None and dtype is not None:
            raise ValueError(f"dtype={dtype!r}: torch has no such dtype. Pass torch.bfloat16, for example")
        if found is None or isinstance(found, torch.dtype):
            return found
        raise TypeError(f"dtype={dtype!r} is no dtype. Pass torch.bfloat16, for example")

    @property
    def is_file(self) -> bool:
        """Whether the export is one file."""
        return self.format == "torch" or self.location.name.endswith(".safetensors")

    def select(self, entries: Mapping[str, Entry]) -> Selection:
        """Return the tensors to write, given all values of the source by key."""
        return select(entries, self.key, self.rename, self.only, self.exclude)

    def out(self, name: str, source: str, shape: Sequence[int], dtype: torch.dtype) -> OutTensor:
        """Return the tensor to write for a tensor of the source.

        Args:
            name: the name in the file.
            source: the key in the source.
            shape: the shape.
            dtype: the dtype in the source.
        """
        return OutTensor(name, source, tuple(shape), dtype, out_dtype(dtype, self.dtype))

"""Objects of a checkpoint as text. No code from the file runs; objects that would need it are shown by their types."""

from __future__ import annotations

import io
import reprlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_xla_ckpt.errors import CheckpointError, UnsafeObjectError
from torch_xla_ckpt.inspecting.text import shown
from torch_xla_ckpt.serialization import decode


@dataclass(frozen=True)
class ObjectView:
    """An object of a checkpoint.

    Args:
        path: the checkpoint's folder.
        key: the object's key.
        nbytes: size of the stored object in bytes.
        type: the object's type; "" if it cannot be rebuilt without running code.
        text: the object, shortened.
        needs: qualified names of the types that the object needs, if those could run code.
    """

    path: str
    key: str
    nbytes: int
    type: str
    text: str
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{shown(self.key)}: {self.type or 'object'}, {self.nbytes:,} bytes stored"
        if self.needs:
            return f"{head}\n  not rebuilt, because it needs {shown(', '.join(self.needs))}, which could run code"
        return f"{head}\n  {shown(self.text)}"


def view_object(path: str, key: str, data: io.BytesIO, nbytes: int) -> ObjectView:
    """Return a stored object as text.

    Args:
        path: the checkpoint's folder.
        key: the object's key.
        data: the bytes of the object, as ``torch.save`` wrote them.
        nbytes: size of the stored object in bytes.
    """
    try:
        value = decode(key, data, (), False)
    except UnsafeObjectError as error:
        if not error.types:
            raise
        return ObjectView(path, key, nbytes, "", "", tuple(error.types))
    return ObjectView(path, key, nbytes, type(value).__name__, object_text(value))


def object_text(value: Any) -> str:
    """Return a short text for a value of any harmless type."""
    try:
        return _Shortener().repr(value)
    except (RecursionError, ValueError, CheckpointError) as error:
        return f"<{type(value).__name__} that cannot be shown: {error}>"


class _Shortener(reprlib.Repr):
    """``reprlib.Repr`` that shows more of containers, and tensors and arrays by shape and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 6
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 20
        self.maxstring = self.maxother = self.maxlong = 200

    def repr_Tensor(self, value: torch.Tensor, level: int) -> str:
        dtype = str(value.dtype).removeprefix("torch.")
        if value.numel() == 1 and not value.is_quantized:
            return f"tensor({value.reshape(()).item()}, {dtype})"
        return f"<tensor of shape {tuple(value.shape)}, {dtype}>"

    def repr_ndarray(self, value: Any, level: int) -> str:
        if value.size <= 8:
            return np.array2string(value, threshold=8).replace("\n", " ")
        return f"<array of shape {value.shape}, {value.dtype}>"

    repr_OrderedDict = repr_defaultdict = repr_Counter = reprlib.Repr.repr_dict

"""The values of a state dict as a save describes them: key, path, dtype, shape and sharding of each."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorProperties, TensorStorageMetadata

from torch_xla_ckpt._dcp.chunks import Chunks
from torch_xla_ckpt._dcp.metadata import properties, size_of
from torch_xla_ckpt._dcp.values import IntegerKey

_GROUP = 1000  # entries in one piece of encoded text, so that Python's lock is never held for long


class Entry(NamedTuple):
    """A value of a state dict, without its data.

    Args:
        key: the value's key.
        path: the value's path in the state dict, with integer keys of mappings as ``IntegerKey``.
        dtype: the tensor's dtype; None for an object.
        shape: shape of the global tensor; empty for an object.
        requires_grad: whether the tensor requires a gradient.
        sharding: a description of the tensor's sharding, for people.
    """

    key: str
    path: tuple[str | int, ...]
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    requires_grad: bool = False
    sharding: str = ""

    @property
    def properties(self) -> TensorProperties | None:
        """DCP's record of the tensor's dtype and flags; None for an object."""
        return None if self.dtype is None else properties(self.dtype, self.requires_grad)

    def metadata(self, chunks: Chunks) -> TensorStorageMetadata | BytesStorageMetadata:
        """Return DCP's metadata of the value. ``chunks`` are the tensor's chunks."""
        record = self.properties
        if record is None:
            return BytesStorageMetadata()
        return TensorStorageMetadata(record, size_of(self.shape), chunks)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return "an object" if self.dtype is None else f"a tensor of shape {self.shape}, {self.dtype}"


def encoded_entries(entries: Sequence[Entry]) -> tuple[bytes, ...]:
    """Return entries as pieces of compressed text. Equal entries have equal pieces.

    Each top-level container of the state dict has pieces of its own. So the pieces of most containers are equal on all
    ranks, even if a rank has values that the others lack.
    """
    pieces = []
    for _, group in groupby(entries, lambda entry: entry.path[0] if len(entry.path) > 1 else None):
        together = list(group)
        pieces += [_encoded(together[at : at + _GROUP]) for at in range(0, len(together), _GROUP)]
    return tuple(pieces)


def _encoded(entries: Sequence[Entry]) -> bytes:
    shardings = {sharding: number for number, sharding in enumerate(dict.fromkeys(e.sharding for e in entries))}
    columns = [
        [entry.key for entry in entries],
        [[[str(e)] if type(e) is IntegerKey else e for e in entry.path] for entry in entries],
        [entry.dtype and str(entry.dtype).removeprefix("torch.") for entry in entries],
        [entry.shape for entry in entries],
        [entry.requires_grad for entry in entries],
        [shardings[entry.sharding] for entry in entries],
        list(shardings),
    ]
    return zlib.compress(json.dumps(columns, separators=(",", ":")).encode("ascii"), 1)


def decoded_entries(piece: bytes) -> Iterator[Entry]:
    """Yield the entries in one piece."""
    keys, paths, dtypes, shapes, grads, numbers, shardings = json.loads(zlib.decompress(piece))
    for key, path, dtype, shape, grad, number in zip(keys, paths, dtypes, shapes, grads, numbers):
        yield Entry(
            key,
            tuple(map(_element, path)),
            dtype and getattr(torch, dtype),
            tuple(shape),
            grad,
            shardings[number],
        )


def _element(element: Any) -> str | int:
    return IntegerKey(element[0]) if type(element) is list else element

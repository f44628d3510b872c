"""The storages of an archive, which tensors share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torch_xla_ckpt.serialization.archive import Archive
from torch_xla_ckpt.serialization.table import Refused

_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "QInt8": torch.qint8,
    "QInt32": torch.qint32,
    "QUInt8": torch.quint8,
    "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
}


class StorageKind:
    """The stand-in for a storage class that a pickle names."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype


STORAGE_KINDS: Mapping[str, StorageKind] = {
    **{
        f"{module}.{name}Storage": StorageKind(dtype)
        for name, dtype in _STORAGES.items()
        for module in ("torch", "torch.cuda")
    },
    "torch.storage.UntypedStorage": StorageKind(torch.uint8),
}


class OtherByteOrder(Exception):
    """The elements of a mapped tensor are in the byte order of another computer."""


class Storages:
    """Makes the storages of an archive on request. Tensors that name the same storage share it.

    Args:
        archive: the archive that holds the storages' bytes.
    """

    def __init__(self, archive: Archive):
        self._archive = archive
        self._made: dict[str, Any] = {}
        self._swapped = "byteorder" in archive and bytes(archive["byteorder"]) != sys.byteorder.encode()

    def __call__(self, pid: Any) -> torch.storage.TypedStorage:
        """Return the storage for a persistent id of a pickle.

        Raises:
            Refused: the id is no storage's, or the archive has fewer bytes than the id claims.
        """
        _require(type(pid) is tuple and len(pid) == 5 and pid[0] == "storage", "refers to something unknown")
        _, kind, key, _, numel = pid
        _require(type(kind) is StorageKind and type(key) is str, "refers to something that is no storage")
        _require(type(numel) is int and numel >= 0, "refers to a storage without a size")
        nbytes = numel * kind.dtype.itemsize
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._storage(key, kind.dtype, nbytes)
        _require((made.dtype, made.nbytes()) == (kind.dtype, nbytes), "gives one storage two sizes")
        return made

    def _storage(self, key: str, dtype: torch.dtype, nbytes: int) -> torch.storage.TypedStorage:
        data = self._bytes(key, nbytes)
        raw = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            raw.numpy()[:] = np.frombuffer(data, np.uint8)
        if dtype is torch.bool:  # kernels rely on 0 and 1
            raw = raw.ne(0).view(torch.uint8)
        untyped = raw.untyped_storage()
        if self._swapped and dtype.itemsize > 1:
            untyped.byteswap(dtype)
        return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)

    def _bytes(self, key: str, nbytes: int) -> memoryview:
        name = f"data/{key}"
        data = self._archive[name] if name in self._archive else memoryview(b"")
        _require(nbytes <= len(data), f"claims {nbytes} bytes for a tensor, more than the archive holds")
        return data[:nbytes]


class MappedStorages(Storages):
    """Makes storages that share the archive's memory."""

    def _storage(self, key: str, dtype: torch.dtype, nbytes: int) -> torch.storage.TypedStorage:
        if self._swapped and dtype.itemsize > 1:
            raise OtherByteOrder
        data = self._bytes(key, nbytes)
        raw = torch.from_numpy(np.frombuffer(data, np.uint8)) if nbytes else torch.empty(0, dtype=torch.uint8)
        return torch.storage.TypedStorage(wrap_storage=raw.untyped_storage(), dtype=dtype, _internal=True)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise Refused(f"its pickle {problem}")

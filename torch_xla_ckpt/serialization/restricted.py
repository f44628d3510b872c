"""``torch.load`` for files of strangers: values of harmless types, and of types that the caller allows."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_xla_ckpt.serialization import arrays, plain, tensors
from torch_xla_ckpt.serialization.archive import Archive
from torch_xla_ckpt.serialization.machine import Machine, Refused, Table, named_in, named_quickly

AllowedType = Any
"""What ``torch.serialization.safe_globals`` takes: an object, or an object and the name it has in the pickle."""

_TABLE = Table(
    {**plain.VALUES, **arrays.VALUES, **tensors.VALUES},
    {**plain.CALLS, **arrays.CALLS, **tensors.CALLS},
    plain.NEWS,
    plain.STATES,
)
# Modules whose objects count only if the caller of a load names them, although torch admits them when it is imported:
# what a pickle says of a jagged tensor's parts, its kernels believe.
_NOT_BY_TORCH = ("torch.nested",)


def load(data: io.BytesIO | memoryview, allow_types: Sequence[AllowedType] = ()) -> Any:
    """The value of an archive that ``torch.save`` wrote, with all tensors on the host.

    Types that the program has registered with ``torch.serialization.add_safe_globals`` are allowed, too.

    Args:
        data: the archive's bytes.
        allow_types: types to admit besides the harmless ones.

    Raises:
        Refused: it asks for something that is not admitted. A ``pickle.UnpicklingError``.
        ArchiveError: it is no such archive. A ``ValueError``.
        Exception: a value is impossible, or a type that was allowed raises this.
    """
    view = data.getbuffer() if type(data) is io.BytesIO else memoryview(data.read() if hasattr(data, "read") else data)
    archive = Archive(view)
    pickled = bytes(archive["data.pkl"])
    machine = Machine(pickled, _TABLE, lambda: _named(allow_types), tensors.Storages(archive), beside=len(view))
    value = machine.run()
    if machine.bytes_left:
        raise Refused("bytes lie behind its pickle")
    return value


def not_harmless(pickled: bytes) -> frozenset[str]:
    """Qualified names in a pickle of protocol 2 that ``load`` does not admit unless told to."""
    if named_quickly(pickled) <= _TABLE.values.keys():
        return frozenset()
    names = named_in(pickled) - _TABLE.values.keys()
    return frozenset(names - _named(()).keys() if names else names)


def _named(allow_types: Sequence[AllowedType]) -> Mapping[str, Any]:
    registered = [one for one in torch.serialization.get_safe_globals() if not _name(one).startswith(_NOT_BY_TORCH)]
    return {_name(one): one[0] if isinstance(one, tuple) else one for one in [*registered, *allow_types]}


def _name(allowed: AllowedType) -> str:
    if isinstance(allowed, tuple):
        _, name = allowed
        return str(name)
    return f"{allowed.__module__}.{allowed.__qualname__}"

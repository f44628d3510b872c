"""A safe ``torch.load``: loads values of harmless types and of types that the caller allows, and refuses all others."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_xla_ckpt.serialization import arrays, plain, storages, tensors, torch_values
from torch_xla_ckpt.serialization.archive import Archive
from torch_xla_ckpt.serialization.machine import Machine
from torch_xla_ckpt.serialization.pickle_names import names_at_most, names_in
from torch_xla_ckpt.serialization.stand_ins import StandInMachine
from torch_xla_ckpt.serialization.table import Refused, Table

AllowedType = Any
"""A type or function, or a pair of it and its name in the pickle, as for ``torch.serialization.safe_globals``."""

_TABLE = Table(
    {**plain.VALUES, **arrays.VALUES, **torch_values.VALUES, **tensors.VALUES},
    {**plain.CALLS, **arrays.CALLS, **torch_values.CALLS, **tensors.CALLS},
    plain.NEWS,
    plain.STATES,
)
# Modules whose objects only the caller of a load can allow. torch registers them as safe, but the kernels of a jagged
# tensor trust what a pickle says about its parts.
_NOT_BY_TORCH = ("torch.nested",)


def load(data: io.BytesIO | memoryview, allow_types: Sequence[AllowedType] = ()) -> Any:
    """Return the value in an archive that ``torch.save`` wrote, with all tensors on the host.

    Types that the program has registered with ``torch.serialization.add_safe_globals`` are allowed, too.

    Args:
        data: the archive's bytes.
        allow_types: types to admit in addition to the harmless ones. Default: none.

    Raises:
        Refused: the archive requests something that is not admitted. A ``pickle.UnpicklingError``.
        ArchiveError: the bytes are no such archive. A ``ValueError``.
        Exception: a value is impossible, or an allowed type raised an error.
    """
    view = data.getbuffer() if type(data) is io.BytesIO else memoryview(data.read() if hasattr(data, "read") else data)
    archive = Archive(view)
    return _run(archive, view, allow_types, storages.Storages(archive))


def writable(view: memoryview) -> memoryview:
    """Return bytes in memory that may be written to: the same memory if possible, else a copy."""
    return memoryview(bytearray(view)) if view.readonly else view


def load_mapped(view: memoryview) -> Any:
    """Return the value in an archive, with tensors that share the memory of ``view``.

    Objects of types that are not admitted are ``StandIn``s. An archive that names functions of an attack is refused.

    Args:
        view: the archive's bytes, in memory that may be written to; see ``writable``.

    Raises:
        OtherByteOrder: the tensors come from a computer with the other byte order.
        Refused, ArchiveError, Exception: as for ``load``.
    """
    archive = Archive(view)
    return _run(archive, view, (), storages.MappedStorages(archive), StandInMachine)


def _run(
    archive: Archive,
    view: memoryview,
    allow_types: Sequence[AllowedType],
    made: storages.Storages,
    kind: type[Machine] = Machine,
) -> Any:
    pickled = bytes(archive["data.pkl"])
    machine = kind(pickled, _TABLE, lambda: _named(allow_types), made, extra_bytes=len(view))
    value = machine.run()
    if machine.bytes_left:
        raise Refused("it has bytes behind its pickle")
    return value


def not_harmless(pickled: bytes) -> frozenset[str]:
    """Return the qualified names in a pickle of protocol 2 that ``load`` admits only if the caller allows them."""
    if names_at_most(pickled) <= _TABLE.values.keys():
        return frozenset()
    names = names_in(pickled) - _TABLE.values.keys()
    return frozenset(names - _named(()).keys() if names else names)


def _named(allow_types: Sequence[AllowedType]) -> Mapping[str, Any]:
    """Return all allowed types by qualified name: those of the caller, and those that the program has registered."""
    registered = [one for one in torch.serialization.get_safe_globals() if not _name(one).startswith(_NOT_BY_TORCH)]
    return {_name(one): one[0] if isinstance(one, tuple) else one for one in [*registered, *allow_types]}


def _name(allowed: AllowedType) -> str:
    if isinstance(allowed, tuple):
        _, name = allowed
        return str(name)
    return f"{allowed.__module__}.{allowed.__qualname__}"

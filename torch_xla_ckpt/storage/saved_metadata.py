"""The metadata that a save returns: DCP's ``Metadata``, printed as one line."""

from __future__ import annotations

import weakref
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.reports import SaveReport, format_bytes
from torch_xla_ckpt.storage.frame import ALIGNMENT
from torch_xla_ckpt.storage.places import Places, StorageEntries

_ROWS = 1 << 16


class SavedMetadata(Metadata):
    """DCP's ``Metadata`` of a committed checkpoint, whose ``repr`` is one line.

    Pickles and copies are plain ``Metadata``, so stock PyTorch reads them without this package. The exception is the
    pickle in which DCP sends the metadata to the other ranks: it holds arrays instead of an object for each chunk.

    Attributes:
        report: where the time of the save went on this process.
    """

    report: SaveReport | None = None
    _is_sent_next = False

    def __repr__(self) -> str:
        keys = len(self.state_dict_metadata)
        stored = self.storage_data
        if isinstance(stored, StorageEntries):
            nbytes = stored.nbytes
        else:
            nbytes = sum(entry.length for entry in (stored or {}).values())
        seconds = "" if self.report is None else f", saved in {self.report.seconds:.2f} s"
        return f"<Metadata of {keys:,} {'key' if keys == 1 else 'keys'}, {format_bytes(nbytes)}{seconds}>"

    def __eq__(self, other: object) -> bool:
        return _values(self) == _values(other) if isinstance(other, Metadata) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        stored = self.storage_data
        if self._is_sent_next and isinstance(stored, StorageEntries) and stored.catalog.describes(self):
            self._is_sent_next = False
            return _arrived, _sent(self, stored)
        return Metadata, _values(self)


def send_as_arrays(metadata: Metadata) -> None:
    """Let the next pickle of a save's metadata hold arrays. DCP makes this pickle, to send it to the other ranks."""
    if isinstance(metadata, SavedMetadata):
        metadata._is_sent_next = True


class _Steady(NamedTuple):
    """Columns that rarely change from save to save, and the forms in which they are sent.

    Args:
        file, length: the columns, which nobody can change.
        files: the files, in pieces.
        lengths: the lengths, as ``_arrived`` takes them.
    """

    file: Integers
    length: Integers
    files: list[_Piece]
    lengths: tuple[_dcp.AnyIntegers, _dcp.AnyIntegers]


_steady: weakref.WeakKeyDictionary[_dcp.Catalog, _Steady] = weakref.WeakKeyDictionary()


def _sent(metadata: Metadata, stored: StorageEntries) -> tuple[Any, ...]:
    catalog, places = stored.catalog, stored.places
    steady = _steady.get(catalog)
    if steady is None or steady.file is not places.file or steady.length is not places.length:
        begins = np.flatnonzero(np.diff(places.length, prepend=-1))  # items of one tensor have one length
        lengths = _dcp.narrow(np.diff(np.append(begins, len(catalog)))), _dcp.narrow(places.length[begins])
        steady = _Steady(places.file, places.length, _pieces(_dcp.narrow(places.file)), lengths)
        if not places.file.flags.writeable and not places.length.flags.writeable:
            _steady[catalog] = steady
    return (
        catalog.packed,
        tuple(places.names),
        [steady.files, _pieces(places.units)],
        steady.lengths,
        None if catalog.has_paths(metadata.planner_data) else (metadata.planner_data,),
        metadata.storage_meta,
        metadata.version,
    )


class _Piece:
    """A piece of a column. Python's lock is given up between pieces, because ``__reduce__`` is a Python function."""

    def __init__(self, numbers: _dcp.AnyIntegers):
        self._numbers = numbers

    def __reduce__(self) -> Any:
        return np.frombuffer, (self._numbers.tobytes(), self._numbers.dtype)


def _pieces(column: _dcp.AnyIntegers) -> list[_Piece]:
    return [_Piece(column[at : at + _ROWS]) for at in range(0, len(column), _ROWS)]


class _Late:
    """A field of ``_ArrivedMetadata``, which is made when somebody looks at it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, metadata: _ArrivedMetadata | None, owner: type) -> Any:
        if metadata is None:
            return None
        metadata.unpack()
        return metadata.__dict__[self._name]


class _ArrivedMetadata(SavedMetadata):
    """Metadata that another rank has sent. Most programs never look at it, so it stays packed until then."""

    state_dict_metadata = _Late()  # type: ignore[assignment]
    planner_data = _Late()
    storage_data = _Late()

    def unpack(self) -> None:
        """Become ordinary ``SavedMetadata``. Several threads may look at once."""
        parts = self.__dict__.get("_packed")
        if parts is None:
            return
        packed, files, columns, lengths, planner_data = parts
        catalog = packed.catalog()
        nothing = np.zeros(0, dtype=np.int64)
        file, units = (np.concatenate([nothing, *column]) for column in columns)
        length = _dcp.repeated(lengths[1].astype(np.int64), lengths[0].astype(np.int64))
        made = catalog.metadata()
        self.__dict__.update(
            state_dict_metadata=made.state_dict_metadata,
            planner_data=made.planner_data if planner_data is None else planner_data[0],
            storage_data=StorageEntries(catalog, Places(files, file, units * ALIGNMENT, length, nothing, nothing)),
        )
        self.__class__ = SavedMetadata  # type: ignore[assignment]
        self.__dict__.pop("_packed", None)


def _arrived(
    packed: _dcp.PackedCatalog,
    files: tuple[str, ...],
    columns: list[list[_dcp.AnyIntegers]],
    lengths: tuple[_dcp.AnyIntegers, _dcp.AnyIntegers],
    planner_data: tuple[Any] | None,
    storage_meta: StorageMeta | None,
    version: str | None,
) -> SavedMetadata:
    """Return metadata that another rank has sent."""
    made = object.__new__(_ArrivedMetadata)
    made.__dict__["_packed"] = packed, files, columns, lengths, planner_data
    made.storage_meta, made.version = storage_meta, version
    return made


def shortened(metadata: Metadata, report: SaveReport) -> Metadata:
    """Let metadata print as one line from now on, and return it.

    DCP returns the object that its planner made, and offers storage no hook to return another one. So the object gets
    another class.

    Args:
        metadata: the metadata of a committed checkpoint. Instances of a subclass of ``Metadata`` are left alone.
        report: where the time of the save went.
    """
    if type(metadata) is Metadata:
        metadata.__class__ = SavedMetadata
    if isinstance(metadata, SavedMetadata):
        metadata.report = report
    return metadata


def plain(metadata: Metadata) -> Metadata:
    """Return metadata as DCP's own class, if it was given the class that prints as one line."""
    return Metadata(*_values(metadata)) if isinstance(metadata, SavedMetadata) else metadata


def _values(metadata: Metadata) -> tuple[Any, ...]:
    return tuple(getattr(metadata, field.name) for field in fields(Metadata))

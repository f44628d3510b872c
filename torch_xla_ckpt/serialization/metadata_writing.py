"""The bytes of ``.metadata`` for stock DCP, made from arrays.

A pickle of millions of chunks takes Python's pickler many seconds, in which it holds Python's lock. Here the pickle's
opcodes are written directly: one record of fixed width for each chunk (``opcode_records``). What ``pickle.load``
returns is what DCP's own writer would have pickled.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.protocols import Bytes
from torch_xla_ckpt.serialization.opcode_records import Numbers, OpcodeRecords

_PIECE = 1 << 14  # records that are made together: Python's lock is held for a millisecond at a time
_INT32 = (1 << 31) - 1
_PROTOCOL = b"\x80\x04"

_CLASSES = (
    *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex),
    *(_dcp.StorageInfo, torch.Size),
)


class MetadataWriter:
    """Writes the metadata of checkpoints that have one catalog.

    Most of the bytes depend on the catalog only. They are made once, and used again by the next save.

    Args:
        catalog: the values and chunks of the checkpoint.
        planner_data: the planner's data, as a tuple of one. Default: the path of each value.
    """

    def __init__(self, catalog: _dcp.Catalog, planner_data: tuple[Any] | None = None):
        self._catalog = catalog
        self._memo = 0
        self._keys: list[int] = []  # the memo of each key
        self._offsets: dict[int, int] = {}  # the memo of the first chunk's offsets, by table
        self._start: list[bytes] = []
        self._chunk_memos: dict[int, int] = {}  # the memo of the first chunk, by table
        self._class: dict[type, bytes] = {}  # the opcodes that push each class
        self._names: dict[str, bytes] = {}
        self._planner_data = planner_data
        self._stored_sizes: tuple[int, int] | None = None  # bytes of a stored offset and of a stored length
        self._stored_rows: list[tuple[slice | Integers, OpcodeRecords]] = []
        self._filled: tuple[Integers, Integers] | None = None  # the files and the lengths in these rows
        self._is_made = False

    def pieces(
        self, storage_meta: StorageMeta, version: str | None, files: Sequence[str], places: StoredColumns
    ) -> Iterator[Bytes]:
        """Yield the bytes of the pickle, in pieces. A piece is valid until the writer is used again.

        Args:
            storage_meta: DCP's record of the save.
            version: DCP's version of the metadata.
            files: the names of the data files.
            places: where each row of the catalog lies.
        """
        if not self._is_made:
            self._start, self._is_made = list(self._until_storage()), True
        yield from self._start
        yield from self._storage(files, places)
        yield self._text("storage_meta") + _fast(storage_meta)
        yield self._text("version") + _fast(version) + b"ub."

    # The part that depends on the catalog only.

    def _until_storage(self) -> Iterator[bytes]:
        head = _PROTOCOL
        planner_data = None
        if self._planner_data is not None:
            pickled, self._memo = _pickled(self._planner_data[0])
            planner_data = _get(self._memo)
            head += pickled + self._put() + b"0"
        for cls in _CLASSES:
            head += b"c%s\n%s\n" % (cls.__module__.encode(), cls.__qualname__.encode())
            self._class[cls] = _get(self._memo)
            head += self._put() + b"0"
        for name in ("properties", "size", "chunks"):
            head += self._text(name)
            self._names[name] = _get(self._memo)
            head += self._put() + b"0"
        yield head + self._class[Metadata] + b")\x81}(" + self._text("state_dict_metadata") + b"}"
        yield from self._values()
        yield self._text("planner_data")
        if planner_data is not None:
            yield planner_data
        else:
            yield from self._paths()
        yield self._text("storage_data") + b"}"

    def _values(self) -> Iterator[bytes]:
        catalog = self._catalog
        properties: dict[tuple[Any, ...], bytes] = {}
        tables: dict[int, bytes] = {}
        uses = np.bincount([table for table in catalog.tables if table >= 0] or [0], minlength=1)
        self._keys = []
        made: list[bytes] = []
        for number, entry in enumerate(catalog.entries):
            made.append(self._text(entry.key))
            self._keys.append(self._memo)
            made.append(self._put())
            record = catalog.properties[number]
            if record is None:
                made.append(self._class[BytesStorageMetadata] + b")\x81s")
            else:
                made.append(self._class[TensorStorageMetadata] + b")\x81}(" + self._names["properties"])
                kind = (record.dtype, record.layout, record.requires_grad, record.memory_format, record.pin_memory)
                if kind in properties:
                    made.append(properties[kind])
                else:
                    made.append(_fast(record))
                    properties[kind] = _get(self._memo)
                    made.append(self._put())
                made += [self._names["size"], self._size(entry.shape), self._names["chunks"]]
                table = catalog.tables[number]
                if table in tables:
                    made.append(tables[table])
                else:
                    yield b"".join(made)
                    made = []
                    is_shared = uses[table] > 1
                    yield from self._chunks(table, len(entry.shape), is_shared)
                    if is_shared:
                        tables[table] = b"](" + self._references(table) + b"e"
                made.append(b"ubs")
            if len(made) > 1 << 12:
                yield b"".join(made)
                made = []
        yield b"".join(made)

    def _chunks(self, table: int, depth: int, is_shared: bool) -> Iterator[bytes]:
        """Yield a list of chunks: each as a call of its class with its offsets and sizes."""
        catalog = self._catalog
        ndim, (a, b) = catalog.ndim, catalog.first[table : table + 2].tolist()
        offsets, sizes = catalog.boxes[a:b, :depth], catalog.boxes[a:b, ndim : ndim + depth]
        distinct, which = _distinct(sizes)
        first_size = self._memo
        for row in distinct.tolist():
            yield self._size(row) + self._put() + b"0"
        self._offsets[table] = first = self._memo
        self._memo += b - a
        self._chunk_memos[table] = chunk = self._memo
        self._memo += b - a if is_shared else 0
        yield b"]("
        for at in range(0, b - a, _PIECE):
            part = slice(at, min(at + _PIECE, b - a))
            numbers = np.arange(part.start, part.stop)
            records = OpcodeRecords(
                self._class[ChunkStorageMetadata],
                *self._size_records(offsets[part]),
                Numbers.written(first + numbers),
                Numbers.read(first_size + which[part]),
                b"\x86R",
                *([Numbers.written(chunk + numbers)] if is_shared else []),
                count=len(numbers),
            )
            yield bytes(records.data)
        yield b"e"

    def _references(self, table: int) -> bytes:
        count = len(self._catalog.chunks[table])
        return bytes(OpcodeRecords(Numbers.read(self._chunk_memos[table] + np.arange(count)), count=count).data)

    def _size_records(self, numbers: Integers) -> list[bytes | Numbers]:
        columns = [Numbers.pushed(numbers[:, dim]) for dim in range(numbers.shape[1])]
        return [self._class[torch.Size], b"(", *columns, b"t\x85R"]

    def _paths(self) -> Iterator[bytes]:
        yield b"}"
        for at in range(0, len(self._keys), 1024):
            made = [b"("]
            for key, entry in zip(self._keys[at : at + 1024], self._catalog.entries[at : at + 1024]):
                made += [_get(key), b"(", *(self._element(one) for one in entry.path), b"t"]
            yield b"".join([*made, b"u"])

    def _element(self, element: str | int) -> bytes:
        return self._text(element) if isinstance(element, str) else _integer(element)

    # The part that every save has anew.

    def _storage(self, files: Sequence[str], places: StoredColumns) -> Iterator[Bytes]:
        """Yield where each item lies, and the next field's end."""
        first = self._memo
        yield b"".join(self._text(name) + b"r" + struct.pack("<I", first + n) + b"0" for n, name in enumerate(files))
        sizes = Numbers.pushed(places.offset).size, Numbers.pushed(places.length).size
        if sizes != self._stored_sizes:
            self._stored_sizes, self._stored_rows = sizes, list(self._unplaced_rows(*sizes))
            self._filled = None
        filled, self._filled = self._filled, None
        is_filled = filled is not None and filled[0] is places.file and filled[1] is places.length
        for rows, records in self._stored_rows:
            if is_filled:
                records.replace_last(None, places.offset[rows], None)
            else:
                records.replace_last(first + places.file[rows], places.offset[rows], places.length[rows])
            yield records.data
        # Only arrays that nobody can change are still the same at the next save.
        if not places.file.flags.writeable and not places.length.flags.writeable:
            self._filled = places.file, places.length

    def _unplaced_rows(self, offset_size: int, length_size: int) -> Iterator[tuple[slice | Integers, OpcodeRecords]]:
        """Yield rows of the catalog, and their records, which lack the places: the memo of the file, offset, length."""
        catalog = self._catalog
        is_tensor = np.array([entry.dtype is not None for entry in catalog.entries], dtype=bool)
        # The memo of a row's offsets is the row plus its value's base.
        base = np.array([self._offsets.get(table, 0) for table in catalog.tables], dtype=np.int64) - catalog.first[:-1]
        keys = np.array(self._keys, dtype=np.int64)
        for at in range(0, len(catalog), _PIECE):
            rows = np.arange(at, min(at + _PIECE, len(catalog)))
            numbers = np.searchsorted(catalog.first[1:], rows, side="right")
            for tensors, some in ((True, is_tensor[numbers]), (False, ~is_tensor[numbers])):
                own, of = rows[some], numbers[some]
                if not len(own):
                    continue
                unknown = np.zeros(len(own), dtype=np.int64)
                records = OpcodeRecords(
                    self._class[MetadataIndex],
                    Numbers.read(keys[of]),
                    *((Numbers.read(own + base[of]), b"\x86R") if tensors else (b"\x85R",)),
                    self._class[_dcp.StorageInfo],
                    Numbers.read(unknown),
                    Numbers.pushed(unknown, offset_size),
                    Numbers.pushed(unknown, length_size),
                    b"\x87R",
                    count=len(own),
                    before=b"(",
                    after=b"u",
                )
                yield slice(at, at + len(own)) if len(own) == len(rows) else own, records

    # Opcodes.

    def _put(self) -> bytes:
        self._memo += 1
        return b"r" + struct.pack("<I", self._memo - 1)

    def _text(self, text: str) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data

    def _size(self, numbers: Sequence[int]) -> bytes:
        return self._class[torch.Size] + b"(" + b"".join(map(_integer, numbers)) + b"t\x85R"


class StoredColumns:
    """Where each row of a catalog lies.

    Args:
        file: for each row, the number of its data file.
        offset: for each row, its first byte in the file.
        length: for each row, its bytes.
    """

    def __init__(self, file: Integers, offset: Integers, length: Integers):
        self.file = file
        self.offset = offset
        self.length = length


def _integer(number: int) -> bytes:
    if -_INT32 <= number <= _INT32:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _get(memo: int) -> bytes:
    return b"h" + bytes([memo]) if memo < 256 else b"j" + struct.pack("<I", memo)


def _distinct(rows: Integers) -> tuple[Integers, Integers]:
    """Return the distinct rows, and the number of the distinct row of each row."""
    if (rows == rows[:1]).all():
        return rows[:1], np.zeros(len(rows), dtype=np.int64)
    found, which = np.unique(rows, axis=0, return_inverse=True)
    return found, which.reshape(-1)


def _fast(value: Any) -> bytes:
    """Return a small value's opcodes, without any use of the memo."""
    data = io.BytesIO()
    pickler = pickle.Pickler(data, protocol=3)
    pickler.fast = True
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduced_properties}
    pickler.dump(value)
    return data.getvalue()[len(_PROTOCOL) : -1]


def _pickled(value: Any) -> tuple[bytes, int]:
    """Return any value's opcodes, and the number of memos that they use."""
    data = io.BytesIO()
    pickler = pickle.Pickler(data, protocol=3)
    pickler.dump(value)
    return data.getvalue()[len(_PROTOCOL) : -1], len(pickler.memo.copy())


def _reduced_properties(properties: TensorProperties) -> tuple[Any, ...]:
    # torch 2.15 added a field. Earlier versions refuse it, and later ones do not need it.
    return copyreg.__newobj__, (TensorProperties,), properties.__getstate__()[:5]  # type: ignore[attr-defined]

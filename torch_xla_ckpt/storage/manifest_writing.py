"""The bytes of a manifest, in pieces. ``docs/format.md`` specifies the format.

A tensor of few chunks is written as a list of lists, which people can read. A tensor of many chunks is packed: its
chunks are columns of integers. A manifest with packed tensors has version 2, and others have version 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.storage.columns import encoded_checksums, encoded_column
from torch_xla_ckpt.storage.frame import ALIGNMENT
from torch_xla_ckpt.storage.places import Places
from torch_xla_ckpt.storage.stored import CHECKSUM_BYTES

FORMAT = "torch_xla_ckpt manifest"
PICKLED = "pickled"
"""Stands for planner data that only ``.metadata`` can hold."""

PACKED_FROM = 64  # chunks of a tensor that is packed
_ROWS = 1 << 12  # rows whose numbers are turned into Python's integers together
_PATHS = 1 << 10


@dataclass(frozen=True)
class KeptText:
    """Parts of a manifest that depend on the catalog only. The next save of the catalog uses them again.

    Args:
        tables: the text of the chunks of packed tensors, by table.
        tensors: the text of packed tensors up to their places, by number.
    """

    tables: dict[int, bytes] = field(default_factory=dict)
    tensors: dict[int, bytes] = field(default_factory=dict)


def manifest_pieces(
    head: Mapping[str, Any],
    files: Mapping[str, int],
    planner_data: Any,
    catalog: _dcp.Catalog,
    places: Places,
    kept: KeptText,
) -> Iterator[bytes]:
    """Yield the bytes of a manifest: one JSON object whose last line holds the checksum of everything before.

    Args:
        head: the members that tell about the save as a whole.
        files: the size in bytes of each data file, by name, in the order of ``places.names``.
        planner_data: the planner's data: the path of each key, for DCP's planners and ours.
        catalog: everything that the checkpoint holds.
        places: where it lies.
        kept: the text that earlier saves of the catalog have made. New text is added.
    """
    hasher = xxhash.xxh3_64()
    for piece in _body(head, files, planner_data, catalog, places, kept):
        hasher.update(piece)
        yield piece
    yield b'\n"xxh3_64": "%s"}' % hasher.hexdigest().encode()


def _body(
    head: Mapping[str, Any],
    files: Mapping[str, int],
    planner_data: Any,
    catalog: _dcp.Catalog,
    places: Places,
    kept: KeptText,
) -> Iterator[bytes]:
    packed = _packed(catalog, places)
    version = 2 if packed else 1
    top = {"format": FORMAT, "version": version, **head, "files": [[name, size] for name, size in files.items()]}
    yield _text(top)[:-1].encode("ascii") + b',"paths":'
    yield from _paths(planner_data)
    shardings: dict[str, int] | None = None
    if packed:
        numbers = enumerate(dict.fromkeys(entry.sharding for entry in catalog.entries if entry.sharding))
        shardings = {sharding: number for number, sharding in numbers}
        yield b',"shardings":' + _text(list(shardings)).encode("ascii") + b',"boxes":['
        tables = list(dict.fromkeys(catalog.tables[number] for number in packed))
        for n, table in enumerate(tables):
            if table not in kept.tables:
                kept.tables[table] = _table(catalog, table)
            yield (b"," if n else b"") + kept.tables[table]
        positions = {table: n for n, table in enumerate(tables)}
        yield b"]"
    yield b',"tensors":{'
    items, columns = _Items(catalog, places), _PackedColumns(catalog, places, sorted(packed))
    separator = b""
    for number, entry in enumerate(catalog.entries):
        if entry.dtype is None:
            continue
        if number not in packed:
            chunks = {"chunks": items.chunks(number)}
            yield separator + _tensor(entry, shardings, chunks).encode("ascii")
        else:
            if number not in kept.tensors:
                kept.tensors[number] = b'%s,"packed":{"boxes":' % _tensor(entry, shardings)[:-1].encode("ascii")
            position = positions[catalog.tables[number]]
            yield b"%s%s%d%s" % (separator, kept.tensors[number], position, columns.text(number))
        separator = b","
    yield b'},"objects":{'
    objects = (number for number, entry in enumerate(catalog.entries) if entry.dtype is None)
    for n, number in enumerate(objects):
        item = f"{json.dumps(catalog.entries[number].key)}:{_text(items.item(int(catalog.first[number])))}"
        yield (b"," if n else b"") + item.encode("ascii")
    yield b"},"


def _packed(catalog: _dcp.Catalog, places: Places) -> frozenset[int]:
    """Return the tensors to pack: those of many chunks, whose elements all lie at one position in their items."""
    many = np.flatnonzero(np.diff(catalog.first) >= PACKED_FROM)
    if not len(many):
        return frozenset()
    least, most = _bounds(places.data, catalog, many)
    return frozenset(number for number in many[least == most].tolist() if catalog.entries[number].dtype is not None)


def _bounds(column: Integers, catalog: _dcp.Catalog, numbers: Integers) -> tuple[Integers, Integers]:
    """Return the smallest and the largest integer of each of some values, which have rows and ascend."""
    # Of two positions, the second one is where the next value begins.
    ends = np.stack([catalog.first[numbers], catalog.first[numbers + 1]], axis=1).reshape(-1)
    ends = ends[:-1] if ends[-1] == len(catalog) else ends
    return np.minimum.reduceat(column, ends)[::2], np.maximum.reduceat(column, ends)[::2]


def _tensor(entry: _dcp.Entry, shardings: Mapping[str, int] | None, more: Mapping[str, Any] | None = None) -> str:
    """Return the text of a tensor's key and members; ``more`` has members that come last."""
    described = {
        "dtype": str(entry.dtype).removeprefix("torch."),
        "shape": entry.shape,
        "requires_grad": entry.requires_grad,
        "sharding": (entry.sharding or None) if shardings is None else shardings.get(entry.sharding),
        **(more or {}),
    }
    return f"{json.dumps(entry.key)}:{_text(described)}"


def _table(catalog: _dcp.Catalog, table: int) -> bytes:
    """Return the text of the chunks of a packed tensor."""
    boxes = catalog.chunks[table].boxes
    offsets, sizes = (
        b",".join(encoded_column(column) for column in numbers.T)
        for numbers in (boxes.starts, boxes.stops - boxes.starts)
    )
    return b'{"count":%d,"offsets":[%s],"sizes":[%s]}' % (len(boxes), offsets, sizes)


class _PackedColumns:
    """The places of packed tensors.

    Args:
        catalog: everything that the checkpoint holds.
        places: where it lies.
        packed: the numbers of the packed tensors, ascending.
    """

    def __init__(self, catalog: _dcp.Catalog, places: Places, packed: Sequence[int]):
        self._first = catalog.first
        self._places = places
        self._columns = (places.file, places.offset // ALIGNMENT, places.length)
        self._bounds: dict[int, tuple[tuple[int, int], ...]] = {}
        if packed:
            numbers = np.array(packed, dtype=np.int64)
            pairs = [zip(*(side.tolist() for side in _bounds(one, catalog, numbers))) for one in self._columns]
            self._bounds = dict(zip(packed, zip(*pairs)))

    def text(self, number: int) -> bytes:
        """Return the members of one tensor that tell its places, and the end of the tensor."""
        first, end = self._first[number : number + 2].tolist()
        a, b = self._places.first_block[[first, end]].tolist()
        data = int(self._places.data[first])
        bounds = self._bounds[number]
        return b',"file":%s,"offset":%s,"length":%s,"data":%s,"checksums":%s}}' % (
            *(encoded_column(column[first:end], known) for column, known in zip(self._columns, bounds)),
            b"null" if data < 0 else b"%d" % data,
            encoded_checksums(self._places.checksums[a:b]),
        )


class _Items:
    """Items as lists for JSON, given by rows that ascend. Numbers are turned into Python's integers in blocks."""

    def __init__(self, catalog: _dcp.Catalog, places: Places):
        self._catalog = catalog
        self._places = places
        self._start = self._stop = 0
        self._lists: list[list[Any]] = []

    def item(self, row: int) -> list[Any]:
        """Return the item in a row."""
        self._read(row, row + 1)
        return self._lists[row - self._start]

    def chunks(self, number: int) -> list[list[Any]]:
        """Return the chunks of a tensor."""
        first, end = self._catalog.first[number : number + 2].tolist()
        depth, ndim = len(self._catalog.entries[number].shape), self._catalog.ndim
        self._read(first, end)
        boxes = self._boxes[first - self._start : end - self._start]
        items = self._lists[first - self._start : end - self._start]
        return [[row[:depth], row[ndim : ndim + depth], *item] for row, item in zip(boxes, items)]

    def _read(self, first: int, end: int) -> None:
        if self._start <= first and end <= self._stop:
            return
        places = self._places
        self._start, self._stop = first, max(end, min(first + _ROWS, len(self._catalog)))
        rows = slice(self._start, self._stop)
        self._boxes = self._catalog.boxes[rows].tolist()
        blocks = places.first_block[self._start : self._stop + 1].tolist()
        checksums = places.checksums[blocks[0] : blocks[-1]].tobytes().hex()
        columns = (column[rows].tolist() for column in (places.file, places.offset, places.length, places.data))
        digits = 2 * CHECKSUM_BYTES
        self._lists = [
            [
                file,
                offset,
                length,
                None if data < 0 else data,
                checksums[(a - blocks[0]) * digits : (b - blocks[0]) * digits],
            ]
            for file, offset, length, data, a, b in zip(*columns, blocks, blocks[1:])
        ]

    _boxes: Sequence[list[int]] = ()


def _paths(planner_data: Any) -> Iterator[bytes]:
    if not are_paths(planner_data):
        yield _text(None if planner_data is None else PICKLED).encode("ascii")
        return
    pairs = list(planner_data.items())
    yield b"{"
    for at in range(0, len(pairs), _PATHS):
        group = {key: _path(path) for key, path in pairs[at : at + _PATHS]}
        yield (b"," if at else b"") + _text(group)[1:-1].encode("ascii")
    yield b"}"


def are_paths(planner_data: Any) -> bool:
    """Whether a planner's data maps each key to its path in the state dict, as the data of DCP's planners does."""
    if not isinstance(planner_data, Mapping):
        return False
    paths = planner_data.values()
    parts: Iterable[Any] = chain.from_iterable(paths) if set(map(type, paths)) <= {tuple} else [None]
    return set(map(type, planner_data)) <= {str} and set(map(type, parts)) <= {str, int, _dcp.IntegerKey}


def _path(path: Sequence[str | int]) -> Sequence[str | int | list[int]]:
    """Return a path for JSON. An integer key of a mapping becomes a list of one integer."""
    return [[int(element)] if type(element) is _dcp.IntegerKey else element for element in path]


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)

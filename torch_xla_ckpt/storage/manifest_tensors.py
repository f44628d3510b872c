"""The text of tensors and objects in a manifest.

A tensor of few chunks is written as a list of lists, which people can read. A tensor of many chunks is packed: its
chunks are columns of integers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.storage.columns import encoded_checksums, encoded_column
from torch_xla_ckpt.storage.places import Places
from torch_xla_ckpt.storage.stored import CHECKSUM_BYTES

PACKED_FROM = 64  # chunks of a tensor that is packed
_ROWS = 1 << 12  # rows whose numbers are turned into Python's integers together
_DIGITS = 2 * CHECKSUM_BYTES


class KeptText:
    """Parts of a manifest that the next save of the same catalog uses again.

    Attributes:
        paths: the text of the path of each key.
        shardings: the number of each distinct sharding.
        tables: the text of the chunks of packed tensors, by table.
        packed: the numbers of the packed tensors, and the position of the chunks of each in the list of tables.
        around: the text of each packed tensor before its offsets, and between these and its checksums, by number.
        templates: the text of other tensors, with gaps for offsets and checksums, by number.
    """

    def __init__(self) -> None:
        self.paths = b""
        self.shardings: dict[str, int] = {}
        self.tables: dict[int, bytes] = {}
        self.packed: Mapping[int, int] = {}
        self.around: dict[int, tuple[bytes, bytes]] = {}
        self.templates: dict[int, bytes] = {}
        self._columns: tuple[Integers, ...] = ()

    def fit(self, catalog: _dcp.Catalog, places: Places) -> None:
        """Drop the text that depends on other files, lengths and positions of data than those in ``places``.

        Only arrays that nobody can change are still the same at the next save.
        """
        if not self.shardings:
            names = dict.fromkeys(entry.sharding for entry in catalog.entries if entry.sharding)
            self.shardings = {sharding: number for number, sharding in enumerate(names)}
        columns = (places.file, places.length, places.data)
        if self._columns and all(known is column for known, column in zip(self._columns, columns)):
            return
        self._columns = () if any(column.flags.writeable for column in columns) else columns
        self.packed, self.around, self.templates = _packed(catalog, places), {}, {}


class PackedText:
    """The text of packed tensors.

    Args:
        catalog: everything that the checkpoint holds.
        places: where it lies.
        kept: the text that earlier saves have made, and that fits. New text is added.
    """

    def __init__(self, catalog: _dcp.Catalog, places: Places, kept: KeptText):
        self._catalog = catalog
        self._places = places
        self._kept = kept
        self._units = places.units
        numbers = np.array(list(kept.packed), dtype=np.int64)
        self._bounds = dict(zip(kept.packed, _bounds(self._units, catalog, numbers)))
        self._steady: Mapping[int, Sequence[tuple[int, int]]] = {}
        if len(kept.around) < len(kept.packed):
            pairs = zip(*(_bounds(column, catalog, numbers) for column in (places.file, places.length)))
            self._steady = dict(zip(kept.packed, pairs))

    def text(self, number: int) -> bytes:
        """Return the text of one tensor."""
        rows = slice(*self._catalog.first[number : number + 2].tolist())
        around = self._kept.around.get(number)
        if around is None:
            around = self._kept.around[number] = self._around(number, rows)
        a, b = self._places.first_block[[rows.start, rows.stop]].tolist()
        offsets = encoded_column(self._units[rows], self._bounds[number])
        return b"".join((around[0], offsets, around[1], encoded_checksums(self._places.checksums[a:b]), b"}}"))

    def _around(self, number: int, rows: slice) -> tuple[bytes, bytes]:
        places = self._places
        file, length = (
            encoded_column(column[rows], bounds)
            for column, bounds in zip((places.file, places.length), self._steady[number])
        )
        data = int(places.data[rows.start])
        tensor = _tensor(self._catalog.entries[number], self._kept.shardings)[:-1].encode("ascii")
        return (
            b'%s,"packed":{"boxes":%d,"file":%s,"offset":' % (tensor, self._kept.packed[number], file),
            b',"length":%s,"data":%s,"checksums":' % (length, b"null" if data < 0 else b"%d" % data),
        )


class ListedText:
    """The text of other tensors, and of objects. Numbers are turned into Python's integers in blocks.

    Args:
        catalog: everything that the checkpoint holds.
        places: where it lies.
        kept: the text that earlier saves have made, and that fits. New text is added.
    """

    def __init__(self, catalog: _dcp.Catalog, places: Places, kept: KeptText):
        self._catalog = catalog
        self._places = places
        self._kept = kept
        self._start = self._stop = 0
        self._values: list[Any] = []

    def text(self, number: int) -> bytes:
        """Return the text of one tensor or object."""
        template = self._kept.templates.get(number)
        if template is None:
            template = self._kept.templates[number] = self._template(number).encode("ascii")
        return template % tuple(self._offsets_and_checksums(*self._catalog.first[number : number + 2].tolist()))

    def _template(self, number: int) -> str:
        catalog, places = self._catalog, self._places
        entry = catalog.entries[number]
        rows = slice(*catalog.first[number : number + 2].tolist())
        columns = (column[rows].tolist() for column in (places.file, places.length, places.data))
        items = [f'{file},%d,{length},{"null" if data < 0 else data},"%s"]' for file, length, data in zip(*columns)]
        if entry.dtype is None:
            return f"{json.dumps(entry.key)}:[".replace("%", "%%") + items[0]
        depth, ndim = len(entry.shape), catalog.ndim
        boxes = catalog.boxes[rows, [*range(depth), *range(ndim, ndim + depth)]].tolist()
        texts = [str([box[:depth], box[depth:]])[:-1].replace(" ", "") for box in boxes]
        chunks = [f"{text},{item}" for text, item in zip(texts, items)]
        tensor = _tensor(entry, self._kept.shardings if self._kept.packed else None)[:-1]
        return tensor.replace("%", "%%") + f',"chunks":[{",".join(chunks)}]}}'

    def _offsets_and_checksums(self, first: int, end: int) -> Sequence[Any]:
        """Return the offset and the checksums of each row from ``first`` to ``end``."""
        if not self._start <= first <= end <= self._stop:
            self._start, self._stop = first, max(end, min(first + _ROWS, len(self._catalog)))
            self._values = self._read(slice(self._start, self._stop))
        return self._values[2 * (first - self._start) : 2 * (end - self._start)]

    def _read(self, rows: slice) -> list[Any]:
        places = self._places
        blocks = places.first_block[rows.start : rows.stop + 1]
        digits = places.checksums[blocks[0] : blocks[-1]].tobytes().hex().encode("ascii")
        counts = np.diff(blocks)
        if (counts == counts[0]).all():
            checksums = np.frombuffer(digits, dtype=f"S{_DIGITS * int(counts[0])}").tolist()
        else:
            ends = ((blocks - blocks[0]) * _DIGITS).tolist()
            checksums = [digits[a:b] for a, b in pairwise(ends)]
        return [value for pair in zip(places.offset[rows].tolist(), checksums) for value in pair]


def table_texts(catalog: _dcp.Catalog, kept: KeptText) -> list[bytes]:
    """Return the texts of the chunks of packed tensors, in the order to which these tensors refer."""
    tables = list(dict.fromkeys(catalog.tables[number] for number in kept.packed))
    for table in tables:
        if table not in kept.tables:
            kept.tables[table] = _table(catalog, table)
    return [kept.tables[table] for table in tables]


def _packed(catalog: _dcp.Catalog, places: Places) -> dict[int, int]:
    """Return the tensors to pack: those of many chunks, whose elements all lie at one position in their items.

    Returns:
        For each tensor the position of its chunks in the list of tables.
    """
    many = np.flatnonzero(np.diff(catalog.first) >= PACKED_FROM)
    bounds = zip(many.tolist(), _bounds(places.data, catalog, many))
    found = [number for number, (a, b) in bounds if a == b and catalog.entries[number].dtype is not None]
    tables: dict[int, int] = {}
    return {number: tables.setdefault(catalog.tables[number], len(tables)) for number in found}


def _bounds(column: _dcp.AnyIntegers, catalog: _dcp.Catalog, numbers: Integers) -> list[tuple[int, int]]:
    """Return the smallest and the largest integer of each of some values, which have rows and ascend."""
    if not len(numbers):
        return []
    # Of two positions, the second one is where the next value begins.
    ends = np.stack([catalog.first[numbers], catalog.first[numbers + 1]], axis=1).reshape(-1)
    ends = ends[:-1] if ends[-1] == len(catalog) else ends
    least, most = np.minimum.reduceat(column, ends)[::2], np.maximum.reduceat(column, ends)[::2]
    return list(zip(least.tolist(), most.tolist()))


def _tensor(entry: _dcp.Entry, shardings: Mapping[str, int] | None) -> str:
    """Return the text of a tensor's key and members, without those that tell about its chunks.

    Args:
        entry: the tensor.
        shardings: the number of each sharding; None if the manifest has no list of shardings.
    """
    described = {
        "dtype": str(entry.dtype).removeprefix("torch."),
        "shape": entry.shape,
        "requires_grad": entry.requires_grad,
        "sharding": (entry.sharding or None) if shardings is None else shardings.get(entry.sharding),
    }
    return f"{json.dumps(entry.key)}:{as_json(described)}"


def _table(catalog: _dcp.Catalog, table: int) -> bytes:
    """Return the text of the chunks of a packed tensor."""
    boxes = catalog.chunks[table].boxes
    offsets, sizes = (
        b",".join(encoded_column(column) for column in numbers.T)
        for numbers in (boxes.starts, boxes.stops - boxes.starts)
    )
    return b'{"count":%d,"offsets":[%s],"sizes":[%s]}' % (len(boxes), offsets, sizes)


def as_json(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)

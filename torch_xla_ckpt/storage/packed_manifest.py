"""Reading manifests of version 2, whose tensors of many chunks are packed, into arrays.

Anybody can write a manifest. So no array is made that is large in comparison with the manifest's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.storage.columns import decoded_checksums, decoded_column
from torch_xla_ckpt.storage.frame import ALIGNMENT
from torch_xla_ckpt.storage.places import Places, StoredItems, blocks_of, extents
from torch_xla_ckpt.storage.stored import CHECKSUM_BYTES

_MOST_DIMENSIONS = 64  # more than torch supports
_LIMIT = 1 << 62
_FAR = 1 << 42  # bytes of a data file up to which one number holds a file's number and a position in the file


class PackedTensors:
    """The tensors and objects of a manifest of version 2.

    Args:
        top: the manifest's JSON.
        dtype_of: returns the dtype of a name.

    Raises:
        ValueError, LookupError, TypeError: the JSON is no manifest.
    """

    def __init__(self, top: Mapping[str, Any], dtype_of: Any):
        self._boxes: Sequence[Any] = top["boxes"]
        self._shardings = top["shardings"]
        self._decoded: dict[int, Integers] = {}
        self._files = len(top["files"])
        if not all(type(sharding) is str for sharding in self._shardings):
            raise ValueError("a sharding that is no text")
        entries, tables, columns, checksums = [], [], [], []
        for key, tensor in top["tensors"].items():
            entry = _dcp.Entry(
                key,
                (key,),
                dtype_of(tensor["dtype"]),
                _sizes(tensor["shape"]),
                _flag(tensor["requires_grad"]),
                self._sharding(tensor["sharding"]),
            )
            boxes, numbers, own = (
                self._packed(entry, tensor["packed"]) if "packed" in tensor else _listed(entry, tensor["chunks"])
            )
            _check_tensor(entry, boxes, numbers)
            entries.append(entry)
            tables.append(boxes)
            columns.append(numbers)
            checksums.append(own)
        for key, item in top["objects"].items():
            entries.append(_dcp.Entry(key, (key,)))
            tables.append(np.zeros((1, 0), dtype=np.int64))
            numbers, own = _items([item])
            if numbers[3, 0] != -1:
                raise ValueError("an object with the bytes of a tensor")
            columns.append(numbers)
            checksums.append(own)
        ndim = max((table.shape[1] // 2 for table in tables), default=0)
        first = np.concatenate([[0], np.cumsum([len(table) for table in tables], dtype=np.int64)])
        boxes = np.empty((int(first[-1]), 2 * ndim), dtype=np.int64)
        for at, table in zip(first.tolist(), tables):
            boxes[at : at + len(table)] = _dcp.repadded(table, ndim)
        catalog = _dcp.Catalog(tuple(entries), first, boxes)
        names = [name for name, _ in top["files"]]
        file, offset, length, data = np.concatenate([np.zeros((4, 0), dtype=np.int64), *columns], axis=1)
        places = Places(names, file, offset, length, data, np.concatenate([np.zeros(0, dtype=np.int64), *checksums]))
        if len(places.checksums) != int(places.first_block[-1]) or (file >= len(names)).any():
            raise ValueError("an item without a place in a file")
        _check_owners(places, [size for _, size in top["files"]])
        self.metadata = catalog.metadata()
        self.metadata.storage_data = StoredItems(catalog, places)

    def _packed(self, entry: _dcp.Entry, packed: Mapping[str, Any]) -> tuple[Integers, Integers, Integers]:
        """Return the boxes, the places and the checksums of a packed tensor."""
        checksums = decoded_checksums(packed["checksums"])
        number = packed["boxes"]
        if type(number) is not int or not 0 <= number < len(self._boxes):
            raise ValueError("a tensor without boxes")
        count = self._boxes[number]["count"]
        if type(count) is not int or not 0 < count <= len(checksums):  # each chunk has a checksum at least
            raise ValueError("a tensor with an impossible number of chunks")
        boxes = self._decoded.get(number)
        if boxes is None:
            offsets, sizes = self._boxes[number]["offsets"], self._boxes[number]["sizes"]
            if not len(offsets) == len(sizes) <= _MOST_DIMENSIONS:
                raise ValueError("boxes with an impossible number of dimensions")
            columns = [decoded_column(column, count) for column in (*offsets, *sizes)]
            boxes = np.stack(columns, axis=1) if columns else np.zeros((count, 0), dtype=np.int64)
            self._decoded[number] = boxes
        data = -1 if packed["data"] is None else int(decoded_column(packed["data"], 1)[0])
        numbers = np.stack(
            [
                decoded_column(packed["file"], count, self._files),
                decoded_column(packed["offset"], count, _LIMIT // ALIGNMENT) * ALIGNMENT,
                decoded_column(packed["length"], count),
                np.full(count, data, dtype=np.int64),
            ]
        )
        if len(checksums) != blocks_of(numbers[2]).sum():
            raise ValueError("a tensor with another number of checksums than blocks")
        return boxes, numbers, checksums

    def _sharding(self, number: Any) -> str:
        if number is None:
            return ""
        if type(number) is not int or not 0 <= number < len(self._shardings):
            raise ValueError("a sharding that is not listed")
        return str(self._shardings[number])


def _listed(entry: _dcp.Entry, chunks: Sequence[Any]) -> tuple[Integers, Integers, Integers]:
    """Return the boxes, the places and the checksums of a tensor that is not packed."""
    rows = []
    for offsets, sizes, *_ in chunks:
        if not len(offsets) == len(sizes) == len(entry.shape):
            raise ValueError("a chunk with another number of dimensions than its tensor")
        rows.append((*_sizes(offsets), *_sizes(sizes)))
    boxes = np.array(rows, dtype=np.int64).reshape(len(rows), 2 * len(entry.shape))
    return boxes, *_items([item for _, _, *item in chunks])


def _items(items: Sequence[Any]) -> tuple[Integers, Integers]:
    """Return the places of items, one column for each, and their checksums."""
    columns, checksums = [], []
    for number, offset, length, data, digits in items:
        place = (number, offset, length, *(() if data is None else (data,)))
        if not all(type(one) is int and 0 <= one < _LIMIT for one in place) or type(digits) is not str:
            raise ValueError("an item without a place in a file")
        own = bytes.fromhex(digits)
        if len(own) != CHECKSUM_BYTES * int(blocks_of(np.array([length]))[0]):
            raise ValueError("an item with another number of checksums than blocks")
        columns.append((number, offset, length, -1 if data is None else data))
        checksums.append(own)
    table = np.array(columns, dtype=np.int64).reshape(len(columns), 4).T
    return table, np.frombuffer(b"".join(checksums), dtype=np.int64)


def _check_tensor(entry: _dcp.Entry, boxes: Integers, numbers: Integers) -> None:
    """Check that each chunk has as many dimensions as its tensor, and fits into its item."""
    if boxes.shape[1] != 2 * len(entry.shape):
        raise ValueError("a chunk with another number of dimensions than its tensor")
    assert entry.dtype is not None
    data, length = numbers[3], numbers[2]
    sizes = boxes[:, len(entry.shape) :]
    nbytes = sizes.astype(np.float64).prod(axis=1) * entry.dtype.itemsize
    # Floating point is exact enough to refuse what no file can hold, and integers tell the rest.
    if (data >= 0).any() and (
        (nbytes > float(1 << 61)).any() or (data + sizes.prod(axis=1) * entry.dtype.itemsize > length)[data >= 0].any()
    ):
        raise ValueError("a chunk that is larger than its item")


def _check_owners(places: Places, sizes: Sequence[Any]) -> None:
    """Check that every byte of every file belongs to exactly one item.

    Raises:
        ValueError: bytes of a file belong to two items, or to none.
    """
    stops = places.offset + extents(places.length)
    if (places.offset >= _FAR).any() or len(places.names) >= _FAR >> 20:
        order = np.lexsort([places.offset, places.file])
    else:
        order = np.argsort(places.file * _FAR + places.offset, kind="stable")
    file, start, stop = places.file[order], places.offset[order], stops[order]
    begins = np.ones(len(file), dtype=bool)
    begins[1:] = file[1:] != file[:-1]
    before = np.concatenate([[0], stop[:-1]])
    before[begins] = 0
    wrong = np.flatnonzero(start != before)
    if len(wrong):
        at = int(wrong[0])
        a, b = sorted((int(start[at]), int(before[at])))
        what = "belong to two items" if start[at] < before[at] else "belong to no item"
        raise ValueError(f"bytes {a:,} to {b:,} of {places.names[int(file[at])]} {what}")
    ends = np.zeros(len(sizes), dtype=np.int64)
    last = np.flatnonzero(np.append(begins[1:], True)) if len(file) else np.zeros(0, dtype=np.int64)
    ends[file[last]] = stop[last]
    for name, end, size in zip(places.names, ends.tolist(), sizes):
        if type(size) is not int or end != size:
            raise ValueError(f"the items of {name} end at byte {end:,}, and its size is {size!r}")


def _sizes(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    if len(found) > _MOST_DIMENSIONS or not all(type(number) is int and 0 <= number < _LIMIT for number in found):
        raise ValueError("a shape with impossible sizes")
    return found


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("a flag that is neither true nor false")
    return value


def chunk_count(top: Mapping[str, Any], tensor: Mapping[str, Any]) -> int:
    """Return the number of chunks of a tensor in a manifest's JSON, of any version."""
    return len(tensor["chunks"]) if "chunks" in tensor else int(top["boxes"][tensor["packed"]["boxes"]]["count"])


def sharding_of(top: Mapping[str, Any], tensor: Mapping[str, Any]) -> Any:
    """Return the sharding of a tensor in a manifest's JSON, of any version."""
    sharding = tensor["sharding"]
    return sharding if sharding is None or top["version"] == 1 else top["shardings"][sharding]

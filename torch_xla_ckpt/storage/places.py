"""Where the items of a checkpoint lie in its data files, as arrays with one row for each chunk and each object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.serialization import StoredColumns
from torch_xla_ckpt.storage.frame import ALIGNMENT
from torch_xla_ckpt.storage.stored import BLOCK, Stored

_NOWHERE = -1
_BLOCK_BITS = BLOCK.bit_length() - 1


class Places(StoredColumns):
    """Where each row of a catalog lies, with checksums.

    Args:
        names: the names of the data files.
        file: for each row, the position of its file in ``names``; -1 if the row is stored nowhere.
        offset: for each row, its first byte in the file.
        length: for each row, its bytes.
        data: for each row, the position of the tensor's first element in the item; -1 if there is none.
        checksums: the checksums of all blocks of all rows, row after row.
    """

    def __init__(
        self,
        names: Sequence[str],
        file: Integers,
        offset: Integers,
        length: Integers,
        data: Integers,
        checksums: Integers,
    ):
        super().__init__(file, offset, length)
        self.names = names
        self.data = data
        self.checksums = checksums
        self.first_block = np.concatenate([[0], np.cumsum(blocks_of(length))])

    def stored(self, row: int, sharding: str | None) -> Stored:
        """Return the place of one row."""
        data = int(self.data[row])
        a, b = self.first_block[row : row + 2].tolist()
        return Stored(
            self.names[int(self.file[row])],
            int(self.offset[row]),
            int(self.length[row]),
            None if data == _NOWHERE else data,
            self.checksums[a:b].tobytes(),
            sharding or None,
        )


def blocks_of(length: Integers) -> Integers:
    """Return the number of checksummed blocks of items with these lengths in bytes."""
    return np.maximum(1, (extents(length) + (BLOCK - 1)) >> _BLOCK_BITS)


def extents(length: Integers) -> Integers:
    """Return the bytes that items take in their files, with the zeros behind them."""
    return (length + (ALIGNMENT - 1)) & -ALIGNMENT  # both are powers of two, and a division takes ten times as long


@dataclass(frozen=True)
class WrittenItems:
    """What one rank has written, in a form that is small to send.

    Args:
        numbers: the positions of the items in the rank's plan.
        names: the names of the rank's data files.
        file, offset, length, data: for each item, as in ``Places``.
        checksums: the checksums of all blocks, item after item.
    """

    numbers: _dcp.AnyIntegers
    names: tuple[str, ...]
    file: _dcp.AnyIntegers
    offset: _dcp.AnyIntegers
    length: _dcp.AnyIntegers
    data: _dcp.AnyIntegers
    checksums: bytes

    @classmethod
    def of(cls, written: Sequence[tuple[int, Stored]]) -> WrittenItems:
        """Return written items, given the position in the plan and the place of each."""
        ordered = sorted(written, key=lambda pair: pair[0])
        names = {name: n for n, name in enumerate(sorted({item.relative_path for _, item in ordered}))}
        rows = [
            (number, names[item.relative_path], item.offset, item.length, _NOWHERE if item.data is None else item.data)
            for number, item in ordered
        ]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
        numbers, file, offset, length, data = (_dcp.narrow(table[:, column].copy()) for column in range(5))
        checksums = b"".join(item.checksums or b"" for _, item in ordered)
        return cls(numbers, tuple(names), file, offset, length, data, checksums)

    def results(self, items: Sequence[WriteItem]) -> list[WriteResult]:
        """Return DCP's list of what was written, given the items of the plan."""
        file, offset, length, data = (
            column.astype(np.int64) for column in (self.file, self.offset, self.length, self.data)
        )
        places = Places(self.names, file, offset, length, data, np.frombuffer(self.checksums, dtype=np.int64))
        stored = [places.stored(row, None) for row in range(len(self.numbers))]
        return [WriteResult(items[n].index, one.length, one) for n, one in zip(self.numbers.tolist(), stored)]

    def file_sizes(self) -> dict[str, int]:
        """Return the size of each data file in bytes, by name."""
        sizes = np.zeros(len(self.names), dtype=np.int64)
        np.maximum.at(
            sizes, self.file.astype(np.int64), self.offset.astype(np.int64) + extents(self.length.astype(np.int64))
        )
        return dict(zip(self.names, sizes.tolist()))


Written = WrittenItems | Sequence[WriteResult]
"""What one rank has written. A list, if the planner has plans of its own kind."""


def written_bytes(result: Written) -> int:
    """Return the bytes of all items that one rank has written."""
    if isinstance(result, WrittenItems):
        return int(result.length.sum(dtype=np.int64))
    return sum(one.size_in_bytes for one in result)


def written_sizes(results: Sequence[Written]) -> dict[str, int]:
    """Return the size in bytes of each data file that a save has written, by name."""
    sizes: dict[str, int] = {}
    for own in results:
        if isinstance(own, WrittenItems):
            sizes |= own.file_sizes()
            continue
        for item in (result.storage_data for result in own):
            sizes[item.relative_path] = max(sizes.get(item.relative_path, 0), item.offset + item.extent)
    return dict(sorted(sizes.items()))


def placed(
    catalog: _dcp.Catalog, names: Sequence[str], results: Sequence[Written], rows: Sequence[Integers | None]
) -> Places:
    """Return where each row of a catalog lies.

    Args:
        catalog: everything that had to be written.
        names: the names of all data files.
        results: what each rank has written.
        rows: for each rank, the catalog's row of each item in its plan; None if they are unknown.
    """
    numbers = {name: number for number, name in enumerate(names)}
    table = np.zeros((4, len(catalog)), dtype=np.int64)
    file, offset, length, data = table
    file[:] = _NOWHERE
    parts = []
    for own, known in zip(results, rows):
        if not isinstance(own, WrittenItems) or known is None:
            found = [(catalog.row(one.index.fqn, one.index.offset), one.storage_data) for one in own]  # type: ignore[union-attr]
            listed = [(row, item) for row, item in found if row is not None]
            known, own = (
                np.array([row for row, _ in listed], dtype=np.int64),
                WrittenItems.of([(number, item) for number, (_, item) in enumerate(listed)]),
            )
        here = known[own.numbers]
        file[here] = np.array([numbers[name] for name in own.names], dtype=np.int64)[own.file]
        offset[here], length[here], data[here] = own.offset, own.length, own.data
        parts.append((here, np.frombuffer(own.checksums, dtype=np.int64)))
    places = Places(names, file, offset, length, data, np.zeros(int(blocks_of(length).sum()), dtype=np.int64))
    counted = np.diff(places.first_block)
    for here, checksums in parts:
        counts = counted[here]
        if len(checksums) == len(here):  # the items are small, as those of large pods are
            places.checksums[places.first_block[here]] = checksums
        else:
            before = np.cumsum(counts) - counts
            places.checksums[np.repeat(places.first_block[here] - before, counts) + np.arange(counts.sum())] = checksums
    return places


def unplaced(catalog: _dcp.Catalog, places: Places) -> dict[str, int]:
    """Return the number of chunks and objects of each key that lie in no file."""
    missing = np.flatnonzero(places.file == _NOWHERE)
    of = np.searchsorted(catalog.first[1:], missing, side="right")
    found, counts = np.unique(of, return_counts=True)
    return {catalog.entries[number].key: count for number, count in zip(found.tolist(), counts.tolist())}


class PlacedItems(_dcp.CompleteStorage):
    """Where each item lies, by DCP's index. Entries are made when they are asked for.

    Args:
        catalog: everything that the checkpoint holds.
        places: where each row lies.
    """

    def __init__(self, catalog: _dcp.Catalog, places: Places):
        self.catalog = catalog
        self.places = places

    def __len__(self) -> int:
        return len(self.catalog)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for entry, own in zip(self.catalog.entries, self.catalog.chunks):
            if entry.dtype is None:
                yield MetadataIndex(entry.key)
            else:
                yield from (MetadataIndex(entry.key, chunk.offsets) for chunk in own)

    def __getitem__(self, index: MetadataIndex) -> Any:
        row = self.catalog.row(index.fqn, index.offset)
        if row is None:
            raise KeyError(index)
        return self._entry(row)

    def _entry(self, row: int) -> Any:
        """Return the entry of one row."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The bytes of all items."""
        return int(self.places.length.sum())


class StoredItems(PlacedItems):
    """``PlacedItems`` whose entries are ``Stored``."""

    def _entry(self, row: int) -> Stored:
        number = int(np.searchsorted(self.catalog.first[1:], row, side="right"))
        return self.places.stored(row, self.catalog.entries[number].sharding)


class StorageEntries(PlacedItems):
    """``PlacedItems`` whose entries are those that stock DCP has. Pickles and copies are plain dicts."""

    def _entry(self, row: int) -> Any:
        places = self.places
        return _dcp.storage_info(places.names[int(places.file[row])], int(places.offset[row]), int(places.length[row]))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

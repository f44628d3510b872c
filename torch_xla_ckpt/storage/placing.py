"""The coordinator's table of what was written where, made from what each rank has sent.

The rows of a checkpoint are in the order of its keys and boxes, and each rank sends its own items. While the plan stays
the same, and the ranks write the same items to the same files, only places in the files and checksums differ from save
to save. So what is known about everything else is kept for the next save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.storage.frame import ALIGNMENT
from torch_xla_ckpt.storage.places import NOWHERE, Places, blocks_of, extents, first_blocks
from torch_xla_ckpt.storage.stored import CHECKSUM_BYTES
from torch_xla_ckpt.storage.written import Runs, Written, WrittenItems

_OTHER_NUMBER = (
    "a rank has sent another number of checksums or places than of items. Nothing was committed. Let all ranks run the "
    "same version of torch_xla_ckpt"
)
_NONE = np.zeros(0, dtype=np.int64)
_NO_UNITS = np.zeros(0, dtype=np.uint8)


class Placing:
    """Where the items that the ranks send belong.

    Args:
        catalog: everything that had to be written.
        results: what each rank has written.
        rows: for each rank, the catalog's row of each item in its plan.
    """

    def __init__(self, catalog: _dcp.Catalog, results: Sequence[WrittenItems], rows: Sequence[Integers]):
        self._rows = list(rows)
        self._is_reusable = all(own.numbers is None for own in results)
        self._contents = [own.contents for own in results]
        self._files = _positions(results)
        bounds = np.cumsum([0, *map(len, results)])
        file, length, data = np.empty((3, int(bounds[-1])), dtype=np.int64)
        self._order = np.full(len(catalog), -1, dtype=np.int64)
        # Not concatenated: Python's lock is held while thousands of arrays are freed together.
        for own, known, files, start, stop in zip(results, rows, self._files, bounds.tolist(), bounds[1:].tolist()):
            numbers = np.array(files, dtype=np.int64)
            file[start:stop] = numbers[_as_many(own.contents.file, own)]
            length[start:stop] = _as_many(own.contents.length, own)
            data[start:stop] = _as_many(own.contents.data, own)
            here = own.rows(known)
            if len(here) != len(own):
                raise CheckpointError(_OTHER_NUMBER)
            self._order[here] = np.arange(start, stop)
        self._is_complete = not len(catalog) or int(self._order.min()) >= 0
        # Read-only arrays: what is made from them is kept as long as they are the same.
        self._file, self._length, self._data = (
            _ordered(column, self._order, missing)
            for column, missing in ((file, NOWHERE), (length, 0), (data, NOWHERE))
        )
        self._first_block = _read_only(first_blocks(self._length))
        counts = blocks_of(length)
        # The position of each block among those that were sent; None if each item has one.
        has_many = self._is_complete and bool((counts != 1).any())
        self._blocks = _block_positions(counts, self._order) if has_many else None
        self._block_counts = np.diff(first_blocks(length)[bounds]).tolist()  # of each rank
        self._extents = extents(length) // ALIGNMENT
        self._by_file: Integers | None = None if (np.diff(file) >= 0).all() else np.argsort(file, kind="stable")
        ordered = file if self._by_file is None else file[self._by_file]
        self._begins = np.flatnonzero(np.diff(ordered, prepend=-1))
        self._used = ordered[self._begins]

    def fits(self, results: Sequence[WrittenItems], rows: Sequence[Integers]) -> bool:
        """Return whether the results of another save of the same catalog belong to the same rows, files and lengths."""
        return (
            self._is_reusable
            and len(results) == len(self._contents)
            and all(known is own for known, own in zip(self._rows, rows))
            and all(own.numbers is None and own.contents == known for own, known in zip(results, self._contents))
            and _positions(results) == self._files
        )

    def places(self, results: Sequence[WrittenItems]) -> tuple[Places, dict[str, int]]:
        """Return where each row lies, and the size in bytes of each data file by name.

        Args:
            results: what each rank has written: what this object was made from, or what fits it.

        Raises:
            CheckpointError: a rank has sent another number of checksums than of blocks, or no place for an item.
        """
        names = sorted({name for own in results for name in own.names})
        units = np.concatenate([_NO_UNITS, *(own.units for own in results)])
        checksums = np.concatenate([_NONE, *(np.frombuffer(own.checksums, dtype=np.int64) for own in results)])
        sent = [len(own.checksums) // CHECKSUM_BYTES for own in results]
        if sent != self._block_counts or len(units) != len(self._extents):
            raise CheckpointError(_OTHER_NUMBER)
        ends = units + self._extents
        ends = ends if self._by_file is None else ends[self._by_file]
        sizes = np.zeros(len(names), dtype=np.int64)
        if len(ends):
            sizes[self._used] = np.maximum.reduceat(ends, self._begins) * ALIGNMENT
        if self._is_complete:
            units = units[self._order]
            checksums = checksums[self._order if self._blocks is None else self._blocks]
        else:  # the save fails, because rows are missing
            units = _ordered(units, self._order, 0)
            checksums = np.zeros(int(self._first_block[-1]), dtype=np.int64)
        offset = units.astype(np.int64) * ALIGNMENT
        places = Places(names, self._file, offset, self._length, self._data, checksums, self._first_block)
        return places, dict(zip(names, sizes.tolist()))


def placed(
    catalog: _dcp.Catalog, results: Sequence[Written], rows: Sequence[Integers | None], known: Placing | None = None
) -> tuple[Placing, Places, dict[str, int]]:
    """Return where each row of a catalog lies, and the size in bytes of each data file by name.

    Args:
        catalog: everything that had to be written.
        results: what each rank has written.
        rows: for each rank, the catalog's row of each item in its plan; None if they are unknown.
        known: the first of the values that an earlier save of the same catalog got. Default: none.

    Returns:
        What the next save of the same catalog can pass as ``known``, the places, and the sizes.

    Raises:
        CheckpointError: a rank has sent another number of checksums than of blocks, or no place for an item.
    """
    pairs = [_with_rows(catalog, own, own_rows) for own, own_rows in zip(results, rows)]
    items, every_row = [own for own, _ in pairs], [own_rows for _, own_rows in pairs]
    placing = known if known is not None and known.fits(items, every_row) else Placing(catalog, items, every_row)
    return placing, *placing.places(items)


def _as_many(runs: Runs, own: WrittenItems) -> Integers:
    """Return the integers of some runs, one for each item.

    Raises:
        CheckpointError: there are more or fewer.
    """
    numbers = runs.numbers()
    if len(numbers) != len(own):
        raise CheckpointError(_OTHER_NUMBER)
    return numbers


def _with_rows(catalog: _dcp.Catalog, own: Written, rows: Integers | None) -> tuple[WrittenItems, Integers]:
    """Return what a rank has written, and the catalog's row of each item in its plan."""
    if isinstance(own, WrittenItems) and rows is not None:
        return own, rows
    assert not isinstance(own, WrittenItems)
    found = [(catalog.row(one.index.fqn, one.index.offset), one.storage_data) for one in own]
    listed = [(row, item) for row, item in found if row is not None]
    items = WrittenItems.of([(number, item) for number, (_, item) in enumerate(listed)])
    return items, np.array([row for row, _ in listed], dtype=np.int64)


def _block_positions(counts: Integers, order: Integers) -> Integers:
    """Return the positions of the blocks of items in another order, given the number of blocks of each item."""
    before, own = np.cumsum(counts) - counts, counts[order]
    return _dcp.repeated(before[order] - (np.cumsum(own) - own), own) + np.arange(own.sum())


def _positions(results: Sequence[WrittenItems]) -> list[list[int]]:
    """Return for each rank the position of each of its files among the sorted names of all files."""
    numbers = {name: n for n, name in enumerate(sorted({name for own in results for name in own.names}))}
    return [[numbers[name] for name in own.names] for own in results]


def _ordered(column: _dcp.AnyIntegers, order: Integers, missing: int) -> Integers:
    """Return a column in another order, with ``missing`` where the order is -1. The result can only be read."""
    if not len(column):
        return _read_only(np.full(len(order), missing, dtype=np.int64))
    found = column[order].astype(np.int64)
    found[order < 0] = missing
    return _read_only(found)


def _read_only(numbers: Integers) -> Integers:
    numbers.flags.writeable = False
    return numbers

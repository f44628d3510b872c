"""Where the items of a checkpoint lie in its data files, as arrays with one row for each chunk and each object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.runtime import lazy_property
from torch_xla_ckpt.serialization import StoredColumns
from torch_xla_ckpt.storage.frame import ALIGNMENT
from torch_xla_ckpt.storage.stored import BLOCK, Stored

NOWHERE = -1
"""The file of a row that is stored nowhere, and the position of the elements in an item that has none."""
_BLOCK_BITS = BLOCK.bit_length() - 1
_ALIGNMENT_BITS = ALIGNMENT.bit_length() - 1


class Places(StoredColumns):
    """Where each row of a catalog lies, with checksums.

    Args:
        names: the names of the data files.
        file: for each row, the position of its file in ``names``; -1 if the row is stored nowhere.
        offset: for each row, its first byte in the file.
        length: for each row, its bytes.
        data: for each row, the position of the tensor's first element in the item; -1 if there is none.
        checksums: the checksums of all blocks of all rows, row after row.
        first_block: for each row, the position of its first checksum; and at the end the number of checksums. Default:
            from the lengths.
    """

    def __init__(
        self,
        names: Sequence[str],
        file: Integers,
        offset: Integers,
        length: Integers,
        data: Integers,
        checksums: Integers,
        first_block: Integers | None = None,
    ):
        super().__init__(file, offset, length)
        self.names = names
        self.data = data
        self.checksums = checksums
        self.first_block = first_blocks(length) if first_block is None else first_block

    @lazy_property
    def units(self) -> _dcp.AnyIntegers:
        """For each row, its first byte in the file, in units of ``ALIGNMENT``, in a small type."""
        return _dcp.narrow(self.offset >> _ALIGNMENT_BITS)

    def stored(self, row: int, sharding: str | None) -> Stored:
        """Return the place of one row."""
        data = int(self.data[row])
        a, b = self.first_block[row : row + 2].tolist()
        return Stored(
            self.names[int(self.file[row])],
            int(self.offset[row]),
            int(self.length[row]),
            None if data == NOWHERE else data,
            self.checksums[a:b].tobytes(),
            sharding or None,
        )


def blocks_of(length: Integers) -> Integers:
    """Return the number of checksummed blocks of items with these lengths in bytes."""
    return np.maximum(1, (extents(length) + (BLOCK - 1)) >> _BLOCK_BITS)


def first_blocks(length: Integers) -> Integers:
    """Return the position of the first checksum of each item, and at the end the number of checksums."""
    return np.concatenate([[0], np.cumsum(blocks_of(length))])


def extents(length: Integers) -> Integers:
    """Return the bytes that items take in their files, with the zeros behind them."""
    return (length + (ALIGNMENT - 1)) & -ALIGNMENT  # both are powers of two, and a division takes ten times as long


def unplaced(catalog: _dcp.Catalog, places: Places) -> dict[str, int]:
    """Return the number of chunks and objects of each key that lie in no file."""
    missing = np.flatnonzero(places.file == NOWHERE)
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

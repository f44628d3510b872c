"""Items to write as arrays of integers. DCP's objects are made from them where DCP asks for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import xxhash
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from torch_xla_ckpt._dcp.catalog import Catalog
from torch_xla_ckpt._dcp.entries import Entry, decoded_entries, encoded_entries
from torch_xla_ckpt._dcp.items import object_item, tensor_item
from torch_xla_ckpt._dcp.metadata import properties, size_of
from torch_xla_ckpt._dcp.padding import AnyIntegers, narrow, repadded
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.runtime import lazy_property


class Items(Sequence[WriteItem]):
    """Items to write, as arrays.

    Args:
        entries: the values that the items belong to.
        numbers: for each item, the position of its value in ``entries``.
        boxes: for each item, the offsets and then the sizes of its box, padded to the same number of dimensions; see
            ``padded_row``. An object's box has no meaning.
    """

    def __init__(self, entries: Sequence[Entry], numbers: Integers, boxes: Integers):
        self.entries = entries
        self.numbers = numbers
        self.boxes = boxes

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> WriteItem: ...

    @overload
    def __getitem__(self, at: slice) -> Items: ...

    def __getitem__(self, at: int | slice) -> WriteItem | Items:
        if isinstance(at, slice):
            return Items(self.entries, self.numbers[at], self.boxes[at])
        return self._item(int(self.numbers[at]), self.boxes[at].tolist())

    def __iter__(self) -> Iterator[WriteItem]:
        for first in range(0, len(self), 4096):  # lists of numbers take more memory than arrays
            part = slice(first, first + 4096)
            yield from map(self._item, self.numbers[part].tolist(), self.boxes[part].tolist())

    def _item(self, number: int, row: list[int]) -> WriteItem:
        entry = self.entries[number]
        if entry.dtype is None:
            return object_item(entry.key)
        depth, ndim = len(entry.shape), len(row) // 2
        chunk = ChunkStorageMetadata(size_of(tuple(row[:depth])), size_of(tuple(row[ndim : ndim + depth])))
        return tensor_item(entry.key, chunk, properties(entry.dtype, entry.requires_grad), size_of(entry.shape))


class Offers(Items):
    """All items that one rank could write, in a form that is small to send.

    Args:
        entries: the rank's values, in the order of its state dict.
        counts: the number of boxes of each value that the rank holds; 1 for an object.
        boxes: the boxes of all values, as in ``Items``.
    """

    def __init__(self, entries: Sequence[Entry], counts: Integers, boxes: Integers):
        super().__init__(entries, np.repeat(np.arange(len(entries)), counts), boxes)
        self._packed = PackedOffers(encoded_entries(entries), *_tables(counts, boxes))

    def __reduce__(self) -> Any:
        return self._packed.__reduce__()

    @property
    def packed(self) -> PackedOffers:
        """The form that is sent."""
        return self._packed


class PackedOffers(Sequence[WriteItem]):
    """``Offers`` as they arrive from a rank. They are unpacked when somebody looks at an item.

    A rank holds the same boxes of many values: models have few kinds of layers. So the boxes are sent once for all
    values that have them.

    Args:
        names: the rank's values, as ``encoded_entries`` returns them.
        kinds: for each value, the number of its table of boxes.
        sizes: for each table, its number of boxes.
        tables: the boxes of all tables, one after the other.
        digest: the digest of everything else, as the rank has computed it. Default: it is computed here.
    """

    def __init__(
        self,
        names: tuple[bytes, ...],
        kinds: AnyIntegers,
        sizes: AnyIntegers,
        tables: AnyIntegers,
        digest: bytes | None = None,
    ):
        self.names = names
        self._kinds = kinds
        self._sizes = sizes
        self._tables = tables
        self.digest = digest or self._digest()
        self._items: Items | None = None

    def __reduce__(self) -> Any:
        return PackedOffers, (self.names, self._kinds, self._sizes, self._tables, self.digest)

    @property
    def packed(self) -> PackedOffers:
        """The form that is sent."""
        return self

    @property
    def ndim(self) -> int:
        """The dimensions that boxes are padded to."""
        return self._tables.shape[1] // 2

    @property
    def counts(self) -> AnyIntegers:
        """The number of boxes of each value."""
        return self._sizes[self._kinds]

    def boxes(self, ndim: int) -> Integers:
        """Return the boxes of all values, padded to ``ndim`` dimensions."""
        counts, sizes = self.counts.astype(np.int64), self._sizes.astype(np.int64)
        first = (np.cumsum(sizes) - sizes)[self._kinds]
        rows = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        return repadded(self._tables, ndim)[rows]

    def _digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=32)
        for piece in (*self.names, _bytes(self._kinds), _bytes(self._sizes), _bytes(self._tables)):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
        return digest.digest()

    def __len__(self) -> int:
        return int(self.counts.sum(dtype=np.int64))

    @overload
    def __getitem__(self, at: int) -> WriteItem: ...

    @overload
    def __getitem__(self, at: slice) -> Items: ...

    def __getitem__(self, at: int | slice) -> WriteItem | Items:
        return self._unpacked()[at]

    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self._unpacked())

    def _unpacked(self) -> Items:
        if self._items is None:
            entries = [entry for piece in self.names for entry in decoded_entries(piece)]
            numbers = np.repeat(np.arange(len(entries)), self.counts)
            self._items = Items(entries, numbers, self.boxes(self.ndim))
        return self._items


class AssignedItems(Items):
    """The items that one rank shall write, as the coordinator knows them. They are sent as ``SentItems``.

    Args:
        catalog: the items of all ranks.
        numbers: for each row of the catalog, the position of its value.
        rows: the position of each of the rank's items among the items of all ranks.
        local: for each of the rank's items, the position of its value in the rank's own offers.
        boxes: the boxes of the rank's items.
    """

    def __init__(self, catalog: Catalog, numbers: Integers, rows: Integers, local: Integers, boxes: AnyIntegers):
        self.entries = catalog.entries
        self.catalog = catalog
        self.rows = rows
        self._numbers = numbers
        self._sent = SentItems(narrow(local), boxes)
        self._reduced: Callable[[], Any] = self._sent.__reduce__

    @property
    def numbers(self) -> Integers:  # type: ignore[override]
        """For each item, the position of its value in ``entries``."""
        return self._numbers[self.rows]

    @property
    def boxes(self) -> Integers:  # type: ignore[override]
        """For each item, its box."""
        return self.catalog.boxes[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __reduce__(self) -> Any:
        return self._reduced()

    def sent_to(self, rank_has: bytes) -> AssignedItems:
        """Return the same items, which are sent as ``HeldItems`` if the rank has them from an earlier save.

        Args:
            rank_has: the digest of the ``SentItems`` that the rank has; empty if it has none.
        """
        is_held = rank_has != b"" and rank_has == self._sent.digest
        return self._sent_as(lambda: (HeldItems, (rank_has,))) if is_held else self

    def sent_as_list(self) -> AssignedItems:
        """Return the same items, which are sent as a list: for a rank that numbers its values otherwise."""
        return self._sent_as(lambda: (list, (list(self),)))

    def _sent_as(self, reduced: Callable[[], Any]) -> AssignedItems:
        other = object.__new__(AssignedItems)
        other.__dict__.update(self.__dict__, _reduced=reduced)
        return other


class SentItems:
    """``AssignedItems`` on their way to the rank, without the values, which the rank knows.

    Args:
        numbers: for each item, the position of its value in the rank's own offers.
        boxes: the boxes of the items.
    """

    def __init__(self, numbers: AnyIntegers, boxes: AnyIntegers):
        self.numbers = numbers
        self.boxes = boxes

    def __reduce__(self) -> Any:
        return SentItems, (self.numbers, self.boxes)

    @lazy_property
    def digest(self) -> bytes:
        """A digest of all items. Different items have different digests."""
        return xxhash.xxh3_128_digest(_bytes(self.numbers) + _bytes(self.boxes))

    def items(self, entries: Sequence[Entry]) -> Items:
        """Return the items, given the rank's values."""
        return Items(entries, self.numbers.astype(np.int64), self.boxes.astype(np.int64))


class HeldItems(NamedTuple):
    """Stands for ``SentItems`` that a rank has from an earlier save.

    Args:
        digest: the digest of these items.
    """

    digest: bytes


def _tables(counts: Integers, boxes: Integers) -> tuple[AnyIntegers, AnyIntegers, AnyIntegers]:
    """Return the number of each value's table of boxes, the sizes of the tables, and the boxes of all tables."""
    known: dict[tuple[int, bytes], int] = {}
    kinds: list[int] = []
    sizes: list[int] = []
    rows, end = [boxes[:0]], 0
    for count in counts.tolist():
        own = boxes[end : end + count]
        end += count
        kind = known.setdefault((count, own.tobytes()), len(known))
        if kind == len(sizes):
            sizes.append(count)
            rows.append(own)
        kinds.append(kind)
    return (
        narrow(np.array(kinds, dtype=np.int64)),
        narrow(np.array(sizes, dtype=np.int64)),
        narrow(np.concatenate(rows)),
    )


def _bytes(numbers: AnyIntegers) -> bytes:
    return f"{numbers.dtype.str}{numbers.shape}".encode() + numbers.tobytes()

"""Everything that a checkpoint holds, as arrays: one row for each chunk of a tensor and for each object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_xla_ckpt._dcp.chunks import Chunks
from torch_xla_ckpt._dcp.entries import Entry, decoded_entries, encoded_entries
from torch_xla_ckpt._dcp.metadata import boxes_of
from torch_xla_ckpt._dcp.padding import AnyIntegers, narrow, padded_row
from torch_xla_ckpt.layout import Box, BoxArray, Integers
from torch_xla_ckpt.runtime import lazy_property


class PackedCatalog(NamedTuple):
    """A catalog in a form that is small to send.

    Args:
        names: the values, as ``encoded_entries`` returns them.
        tables: for each value, the position of the first tensor with the same chunks; -1 for an object.
        boxes: the boxes of these first tensors, by position.
    """

    names: tuple[bytes, ...]
    tables: tuple[int, ...]
    boxes: dict[int, AnyIntegers]

    def catalog(self) -> Catalog:
        """Return the catalog."""
        entries = tuple(entry for piece in self.names for entry in decoded_entries(piece))
        ndim = max((len(table[0]) // 2 for table in self.boxes.values() if len(table)), default=0)
        nothing = np.zeros((1, 2 * ndim), dtype=np.int64)
        rows = [self.boxes[table].astype(np.int64) if table >= 0 else nothing for table in self.tables]
        first = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
        return Catalog(entries, first, np.concatenate([nothing[:0], *rows]))


class Catalog:
    """The values of a checkpoint and their chunks. It never changes.

    Args:
        entries: the values.
        first: for each value, its first row; and at the end the number of rows. An object has one row.
        boxes: for each row, the offsets and then the sizes of the chunk, padded as in ``Items``.

        properties: DCP's record of each tensor's dtype and flags; None for an object. Default: from the entries.

    Attributes:
        chunks: the chunks of each value. Tensors with equal chunks share one object.
        tables: for each value, the position of the first tensor with the same chunks; -1 for an object.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        first: Integers,
        boxes: Integers,
        properties: Sequence[TensorProperties | None] | None = None,
    ):
        self.entries = entries
        self.properties = properties or [entry.properties for entry in entries]
        self.first = first
        self.boxes = boxes
        self.tables = self._tables()
        self.chunks = self._chunks()
        self._positions: dict[str, int] | None = None

    @lazy_property
    def packed(self) -> PackedCatalog:
        """The form that is sent to other ranks."""
        tables = sorted({table for table in self.tables if table >= 0})
        boxes = {table: narrow(self.boxes[self.first[table] : self.first[table + 1]]) for table in tables}
        return PackedCatalog(encoded_entries(self.entries), self.tables, boxes)

    @classmethod
    def of(cls, metadata: Metadata, shardings: Mapping[str, str]) -> Catalog:
        """Return the catalog of a checkpoint that another planner has planned.

        Args:
            metadata: DCP's metadata.
            shardings: a description of the sharding of each tensor, where it is known, by key.
        """
        entries, rows, counts = [], [], []
        properties: list[TensorProperties | None] = []
        saved = metadata.state_dict_metadata
        ndim = max((len(one.size) for one in saved.values() if isinstance(one, TensorStorageMetadata)), default=0)
        for key, one in saved.items():
            properties.append(None if isinstance(one, BytesStorageMetadata) else one.properties)
            if isinstance(one, BytesStorageMetadata):
                entries.append(Entry(key, (key,)))
                rows.append(np.array([padded_row(Box((), ()), ndim)], dtype=np.int64))
            else:
                dtype, grad = one.properties.dtype, one.properties.requires_grad
                entries.append(Entry(key, (key,), dtype, tuple(one.size), grad, shardings.get(key, "")))
                boxes, depth = boxes_of(one), len(one.size)
                table = np.zeros((len(boxes), 2 * ndim), dtype=np.int64)
                table[:, :depth], table[:, ndim : ndim + depth] = boxes.starts, boxes.stops - boxes.starts
                table[:, ndim + depth :] = 1
                rows.append(table)
            counts.append(len(rows[-1]))
        first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        return cls(entries, first, np.concatenate([np.zeros((0, 2 * ndim), dtype=np.int64), *rows]), properties)

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def ndim(self) -> int:
        """The dimensions that boxes are padded to."""
        return self.boxes.shape[1] // 2

    def metadata(self) -> Metadata:
        """Return DCP's metadata, with the path of each value as the planner's data."""
        return Metadata(
            state_dict_metadata={entry.key: entry.metadata(own) for entry, own in zip(self.entries, self.chunks)},
            planner_data={entry.key: entry.path for entry in self.entries},
        )

    def has_paths(self, planner_data: object) -> bool:
        """Whether a planner's data is the path of each value of this catalog."""
        return (
            isinstance(planner_data, dict)
            and list(planner_data) == [entry.key for entry in self.entries]
            and all(path is entry.path for path, entry in zip(planner_data.values(), self.entries))
        )

    def describes(self, metadata: Metadata) -> bool:
        """Whether metadata list exactly the values and chunks of this catalog."""
        saved = metadata.state_dict_metadata
        return len(saved) == len(self.entries) and all(
            known == entry.key
            and (
                isinstance(one, BytesStorageMetadata)
                if entry.dtype is None
                else isinstance(one, TensorStorageMetadata) and id(one.chunks) == id(own)
            )
            for (known, one), entry, own in zip(saved.items(), self.entries, self.chunks)
        )

    def row(self, key: str, offsets: Sequence[int] | None) -> int | None:
        """Return the row of a chunk, or of an object if ``offsets`` is None; None if there is no such row."""
        if self._positions is None:
            self._positions = {entry.key: number for number, entry in enumerate(self.entries)}
        number = self._positions.get(key)
        if number is None or (offsets is None) != (self.entries[number].dtype is None):
            return None
        at = 0 if offsets is None else self.chunks[number].number(offsets)
        return None if at is None else int(self.first[number]) + at

    def _tables(self) -> tuple[int, ...]:
        known: dict[tuple[int, bytes], int] = {}
        bounds = self.first.tolist()
        return tuple(
            -1 if entry.dtype is None else known.setdefault((len(entry.shape), self.boxes[a:b].tobytes()), number)
            for number, (entry, a, b) in enumerate(zip(self.entries, bounds, bounds[1:]))
        )

    def _chunks(self) -> tuple[Chunks, ...]:
        ndim, bounds = self.ndim, self.first.tolist()
        made: list[Chunks] = []
        for number, (entry, table) in enumerate(zip(self.entries, self.tables)):
            if 0 <= table < number:
                made.append(made[table])
                continue
            boxes = self.boxes[bounds[number] : bounds[number + 1]]
            starts = boxes[:, : len(entry.shape)]
            made.append(Chunks(BoxArray(starts, starts + boxes[:, ndim : ndim + len(entry.shape)])))
        return tuple(made)

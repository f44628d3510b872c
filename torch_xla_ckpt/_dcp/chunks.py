"""The chunks of one tensor as arrays, which look like DCP's list of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torch_xla_ckpt.layout import BoxArray

_LOOKUPS = 16  # chunks that are searched one by one before all of them are put into a dict


class Chunks(Sequence[ChunkStorageMetadata]):
    """The chunks of a tensor. DCP's objects are made when they are asked for.

    A pod's checkpoint has millions of chunks, and most programs look at few of them. Pickles and copies are plain
    lists of DCP's chunks.

    Args:
        boxes: the chunks.
    """

    def __init__(self, boxes: BoxArray):
        self.boxes = boxes
        self._lookups = 0
        self._numbers: dict[tuple[int, ...], int] | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    @overload
    def __getitem__(self, at: int) -> ChunkStorageMetadata: ...

    @overload
    def __getitem__(self, at: slice) -> Chunks: ...

    def __getitem__(self, at: int | slice) -> ChunkStorageMetadata | Chunks:
        if isinstance(at, slice):
            return Chunks(self.boxes.take(at))
        box = self.boxes[at]
        return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        sizes: dict[tuple[int, ...], torch.Size] = {}

        def size(numbers: list[int]) -> torch.Size:
            key = tuple(numbers)
            return sizes.get(key) or sizes.setdefault(key, torch.Size(key))

        lengths = self.boxes.stops - self.boxes.starts
        for start, length in zip(self.boxes.starts.tolist(), lengths.tolist()):
            yield ChunkStorageMetadata(torch.Size(start), size(length))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Chunks):
            a, b = self.boxes, other.boxes
            return np.array_equal(a.starts, b.starts) and np.array_equal(a.stops, b.stops)
        return list(self) == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> Any:
        return list, (list(self),)

    def number(self, offsets: Sequence[int]) -> int | None:
        """Return the position of the chunk at these offsets; None if there is none."""
        if self._numbers is None and self._lookups < _LOOKUPS:
            self._lookups += 1
            if len(offsets) != self.boxes.ndim:
                return None
            found = np.flatnonzero((self.boxes.starts == np.array(offsets, dtype=np.int64)).all(axis=1))
            return int(found[-1]) if len(found) else None
        if self._numbers is None:
            self._numbers = {tuple(start): number for number, start in enumerate(self.boxes.starts.tolist())}
        return self._numbers.get(tuple(offsets))

"""What one rank needs of the data files, and its part of reading them together, small enough to be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torch_xla_ckpt.layout import Integers


@dataclass(frozen=True)
class Needs:
    """The saved items that one rank reads, and their byte ranges.

    A range of an item may be cut at any multiple of ``assignment.CUT`` bytes from the range's start.

    Args:
        files: names of data files.
        items: an (n, 4) array. A row is an item: 0 for an object and 1 for a tensor; the position of its key in the
            checkpoint's metadata; the position of its file in ``files``; the item's first byte in the file.
        ranges: an (m, 3) array. A row is a byte range: the position of its item in ``items``; start and stop in the
            file.
        memory_budget: the rank's memory budget in bytes.
    """

    files: tuple[str, ...]
    items: Integers
    ranges: Integers
    memory_budget: int

    @classmethod
    def of(
        cls,
        items: Sequence[tuple[bool, int, str, int]],
        ranges: Sequence[Sequence[tuple[int, int]]],
        memory_budget: int,
    ) -> Needs:
        """Return the needs of a rank.

        Args:
            items: for each item, whether it is a tensor, the position of its key, its file and its first byte.
            ranges: for each item, the byte ranges to read, ascending.
            memory_budget: the rank's memory budget in bytes.
        """
        names: dict[str, int] = {}
        rows = [(is_tensor, key, names.setdefault(name, len(names)), start) for is_tensor, key, name, start in items]
        spans = [(number, *span) for number, wanted in enumerate(ranges) for span in wanted]
        return cls(
            tuple(names),
            np.array(rows, dtype=np.int64).reshape(len(rows), 4),
            np.array(spans, dtype=np.int64).reshape(len(spans), 3),
            memory_budget,
        )


class Parcel(NamedTuple):
    """Bytes of a file that several ranks need. One of them reads the bytes, and sends them to the others.

    Args:
        number: the parcel's number, the same on all ranks.
        round: the round in which the parcel is passed on.
        file: the file's name.
        start, stop: the bytes in the file.
        reader: the rank that reads the parcel, as numbered in the group.
        receivers: the other ranks that need the parcel.
    """

    number: int
    round: int
    file: str
    start: int
    stop: int
    reader: int
    receivers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the parcel."""
        return self.stop - self.start


@dataclass(frozen=True)
class Share:
    """One rank's part of reading together.

    Args:
        rounds: for each item of the rank's needs, the round in which the rank handles it. All ranks handle the rounds
            in ascending order.
        parcels: the parcels that the rank reads for others or gets from others, in the order of their numbers.
    """

    rounds: Integers
    parcels: tuple[Parcel, ...]

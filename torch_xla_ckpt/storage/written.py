"""What one rank has written, in a form that is small to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.storage.frame import ALIGNMENT
from torch_xla_ckpt.storage.places import NOWHERE, Places, extents
from torch_xla_ckpt.storage.stored import Stored


class Runs(NamedTuple):
    """Integers of which neighbours are often equal. Equal integers have equal runs.

    Args:
        values: the integer of each run, and the type of these integers.
        counts: the number of integers in each run, and the type of these numbers. Empty if each run is one integer.
    """

    values: tuple[str, bytes]
    counts: tuple[str, bytes] = ("", b"")

    @classmethod
    def of(cls, numbers: Integers) -> Runs:
        """Return the runs of some integers."""
        begins = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 1))
        if 2 * len(begins) > len(numbers):
            return cls(_sent(numbers))
        return cls(_sent(numbers[begins]), _sent(np.diff(begins, append=len(numbers))))

    def numbers(self) -> Integers:
        """Return the integers."""
        values = _arrived(self.values)
        return np.repeat(values, _arrived(self.counts)) if self.counts[0] else values

    def total(self) -> int:
        """Return the sum of the integers."""
        values = _arrived(self.values)
        return int((values * _arrived(self.counts)).sum() if self.counts[0] else values.sum())


class Contents(NamedTuple):
    """What a rank has written to which file. It rarely changes from save to save, unlike the places in the files.

    Args:
        file: for each item, the position of its file among the rank's files.
        length: for each item, its bytes.
        data: for each item, the position of the tensor's first element in the item; -1 if there is none.
    """

    file: Runs
    length: Runs
    data: Runs


@dataclass(frozen=True)
class WrittenItems:
    """What one rank has written, in a form that is small to send.

    Args:
        numbers: the positions of the items in the rank's plan, ascending; None if they are 0, 1, 2, and so on.
        names: the names of the rank's data files.
        contents: the items of each file.
        units: for each item, its first byte in the file, in units of ``ALIGNMENT``.
        checksums: the checksums of all blocks, item after item.
    """

    numbers: _dcp.AnyIntegers | None
    names: tuple[str, ...]
    contents: Contents
    units: _dcp.AnyIntegers
    checksums: bytes

    @classmethod
    def of(cls, written: Sequence[tuple[int, Stored]]) -> WrittenItems:
        """Return written items, given the position in the plan and the place of each."""
        ordered = sorted(written, key=lambda pair: pair[0])
        names = {name: n for n, name in enumerate(sorted({item.relative_path for _, item in ordered}))}
        rows = [
            (number, names[item.relative_path], item.offset, item.length, NOWHERE if item.data is None else item.data)
            for number, item in ordered
        ]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
        checksums = b"".join(item.checksums or b"" for _, item in ordered)
        numbers, file, offset, length, data = table.T.copy()
        return cls.of_columns(tuple(names), numbers, file, offset, length, data, checksums)

    @classmethod
    def of_columns(
        cls,
        names: tuple[str, ...],
        numbers: Integers,
        file: Integers,
        offset: Integers,
        length: Integers,
        data: Integers,
        checksums: bytes,
    ) -> WrittenItems:
        """Return written items, given a column for each of their properties."""
        some = None if np.array_equal(numbers, np.arange(len(numbers))) else _dcp.narrow(numbers)
        contents = Contents(*map(Runs.of, (file, length, data)))
        return cls(some, names, contents, _dcp.narrow(offset // ALIGNMENT), checksums)

    def __len__(self) -> int:
        return len(self.units)

    def rows(self, known: Integers) -> Integers:
        """Return the row of each item, given the rows of the items of the rank's plan."""
        return known[: len(self)] if self.numbers is None else known[self.numbers]

    def results(self, items: Sequence[WriteItem]) -> list[WriteResult]:
        """Return DCP's list of what was written, given the items of the plan."""
        file, length, data = (column.numbers() for column in self.contents)
        offset = self.units.astype(np.int64) * ALIGNMENT
        places = Places(self.names, file, offset, length, data, np.frombuffer(self.checksums, dtype=np.int64))
        stored = [places.stored(row, None) for row in range(len(self))]
        return [WriteResult(item.index, one.length, one) for item, one in zip(self._own(items), stored)]

    def _own(self, items: Sequence[WriteItem]) -> Sequence[WriteItem]:
        return items[: len(self)] if self.numbers is None else [items[n] for n in self.numbers.tolist()]

    def file_sizes(self) -> dict[str, int]:
        """Return the size of each data file in bytes, by name."""
        sizes = np.zeros(len(self.names), dtype=np.int64)
        ends = self.units.astype(np.int64) * ALIGNMENT + extents(self.contents.length.numbers())
        np.maximum.at(sizes, self.contents.file.numbers(), ends)
        return dict(zip(self.names, sizes.tolist()))


Written = WrittenItems | Sequence[WriteResult]
"""What one rank has written. A list, if the planner has plans of its own kind."""


def written_bytes(result: Written) -> int:
    """Return the bytes of all items that one rank has written."""
    if isinstance(result, WrittenItems):
        return result.contents.length.total()
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


def _sent(numbers: Integers) -> tuple[str, bytes]:
    small = _dcp.narrow(numbers)
    return small.dtype.str, small.tobytes()


def _arrived(sent: tuple[str, bytes]) -> Integers:
    return np.frombuffer(sent[1], dtype=sent[0]).astype(np.int64)

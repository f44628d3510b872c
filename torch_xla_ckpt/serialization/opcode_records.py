"""Records of pickle opcodes: equal bytes for each row of a table, and numbers that differ from row to row.

numpy fills the numbers of thousands of records at once. https://docs.python.org/3/library/pickletools.html lists the
opcodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_xla_ckpt.layout import Integers

_INT32 = (1 << 31) - 1


class Numbers(NamedTuple):
    """A number in each record.

    Args:
        opcode: the opcode before the number.
        values: the number of each record; none is negative.
        size: the bytes of the number: 4 or 8.
    """

    opcode: bytes
    values: Integers
    size: int = 4

    @classmethod
    def pushed(cls, values: Integers, size: int | None = None) -> Numbers:
        """Return numbers that are pushed as Python integers. Default size: the smaller one that fits all of them."""
        size = size or (4 if not values.size or values.max() <= _INT32 else 8)
        return cls(b"J" if size == 4 else b"\x8a\x08", values, size)

    @classmethod
    def read(cls, memos: Integers) -> Numbers:
        """Return records' memos, which are read."""
        return cls(b"j", memos)

    @classmethod
    def written(cls, memos: Integers) -> Numbers:
        """Return records' memos, which are written."""
        return cls(b"r", memos)


class OpcodeRecords:
    """Records that differ in their numbers only. The numbers can be replaced, and everything else is kept.

    Args:
        parts: what each record consists of.
        count: the number of records.
        before: bytes before the first record. Default: none.
        after: bytes behind the last record. Default: none.
    """

    def __init__(self, *parts: bytes | Numbers, count: int, before: bytes = b"", after: bytes = b""):
        record, places, numbers = b"", [], []
        for part in parts:
            if isinstance(part, Numbers):
                record += part.opcode
                places.append(len(record))
                record += bytes(part.size)
                numbers.append(part)
            else:
                record += part
        self._data = bytearray(before + record * count + after)
        self._names = [str(number) for number in range(len(numbers))]
        formats = [f"<u{one.size}" for one in numbers]
        kind = np.dtype({"names": self._names, "formats": formats, "offsets": places, "itemsize": len(record)})
        self._rows = np.frombuffer(self._data, dtype=kind, count=count, offset=len(before))
        self.replace_last(*(one.values for one in numbers))

    def replace_last(self, *values: Integers | None) -> None:
        """Replace the last numbers of each record, in the order of the parts. None leaves a number as it is."""
        for name, column in zip(self._names[len(self._names) - len(values) :], values):
            if column is not None:
                self._rows[name] = column

    @property
    def data(self) -> memoryview:
        """The bytes of all records. They change when numbers are replaced."""
        return memoryview(self._data)

"""The stack of the pickle machine, and the opcodes for plain data: numbers, text, bytes, tuples and the memo."""

from __future__ import annotations

import struct
from typing import Any

from torch_xla_ckpt.serialization.table import Refused, UnfinishedObject


class StackMachine:
    """Reads a pickle's bytes and executes the opcodes that need no table.

    Public methods are opcodes; pickletools documents them.

    Args:
        data: the pickle.
    """

    def __init__(self, data: bytes):
        self._data = data
        self._at = 0  # position of the next byte
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}

    @property
    def bytes_left(self) -> int:
        """Number of bytes behind the pickle."""
        return len(self._data) - self._at

    # Arguments of opcodes.

    def _take(self, count: int) -> bytes:
        start = self._at
        self._at = end = start + count
        taken = self._data[start:end]
        if len(taken) < count:
            raise EOFError("the pickle ends too early")
        return taken

    def _octet(self) -> int:
        octet = self._data[self._at]
        self._at += 1
        return octet

    def _length(self, width: int = 4) -> int:
        return int.from_bytes(self._take(width), "little")

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    # Marks.

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop_mark(self) -> None:
        self._since_mark()

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._stack = self._below.pop()

    # Data.

    def int4(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def int2(self) -> None:
        self._stack.append(int.from_bytes(self._take(2), "little"))

    def int1(self) -> None:
        self._stack.append(self._octet())

    def long1(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._octet()), "little", signed=True))

    def long4(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._length()), "little", signed=True))

    def float8(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def text(self) -> None:
        self._push_text(self._length())

    def text1(self) -> None:
        self._push_text(self._octet())

    def text8(self) -> None:
        self._push_text(self._length(8))

    def _push_text(self, length: int) -> None:
        self._stack.append(self._take(length).decode("utf-8", "surrogatepass"))

    def bytes1(self) -> None:
        self._stack.append(self._take(self._octet()))

    def bytes4(self) -> None:
        self._stack.append(self._take(self._length()))

    def bytes8(self) -> None:
        self._stack.append(self._take(self._length(8)))

    def frame(self) -> None:
        self._take(8)  # a hint for readers of streams

    def tuple_(self) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def tuple1(self) -> None:
        self._last(1)

    def tuple2(self) -> None:
        self._last(2)

    def tuple3(self) -> None:
        self._last(3)

    def _last(self, count: int) -> None:
        stack = self._stack
        if len(stack) < count:
            raise IndexError("the pickle takes more from its stack than there is")
        stack[-count:] = [tuple(stack[-count:])]

    # The memo.

    def put1(self) -> None:
        self._put(self._octet())

    def put4(self) -> None:
        self._put(self._length())

    def memoize(self) -> None:
        self._put(len(self._memo))

    def _put(self, slot: int) -> None:
        value = self._memo[slot] = self._stack[-1]
        if type(value) is UnfinishedObject:
            value.slots.append(slot)

    def get1(self) -> None:
        self._get(self._octet())

    def get4(self) -> None:
        self._get(self._length())

    def _get(self, slot: int) -> None:
        value = self._memo[slot]
        if type(value) is UnfinishedObject:
            raise Refused("its pickle uses an object that is not finished")
        self._stack.append(value)

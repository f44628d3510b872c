"""Executing a pickle without giving it power over the program.

A pickle is a program for a stack machine. Python's machine calls whatever the pickle names, and sets attributes of
anything. This machine makes plain containers, and calls only the functions of its table; each of them checks its
arguments. What the caller allows in addition is called as Python's pickle would. The machine does not recurse, takes
time and memory in proportion to the pickle, and knows only the binary opcodes of protocols 2 to 5 that data needs:
https://docs.python.org/3/library/pickletools.html lists them.
"""

from __future__ import annotations

import _compat_pickle
import collections
import copyreg
import pickle
import pickletools
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

# Bytes that calls and hashes may go through: so many, and so many times the size of the data. Few opcodes describe a
# tuple of 2**100 leaves, or copy one list again and again.
_FREE = 1 << 26
_TIMES = 16
_LEVELS = 10_000  # of tuples, whose hash recurses in C
MAX_EXPANDED = 1 << 28
"""Bytes up to which a tensor may be larger than its storage, which strides of 0 repeat, and still be computed with."""
# Modules from which nothing is admitted, even if the caller allows it.
_BLOCKED = ("sys", "os", "posix", "nt")

_CONTAINERS = frozenset({list, dict, set, frozenset, bytearray, collections.OrderedDict, collections.Counter})
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_SEQUENCES = (list, collections.deque)


class Refused(pickle.UnpicklingError):
    """A pickle asks for something that is not admitted.

    Attributes:
        names: qualified names that are not admitted.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()):
        super().__init__(message)
        self.names = names


class Maker:
    """What a name stands for on the stack, if it stands for a function: it can be called by the machine alone."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any]):
        self.name = name
        self.make = make

    def __repr__(self) -> str:
        return f"<{self.name}, to be called by a pickle only>"


class Pending:
    """An object that is made when its state is known, and is of no use before."""

    def __init__(self, finish: Callable[[Any], Any]):
        self.finish = finish
        self.slots: list[int] = []  # of the memo, that refer to it


class Table:
    """What pickles may name.

    Args:
        values: what a name stands for: a class, a constant, or a ``Maker``.
        calls: how an instance of a class is made from arguments.
        news: how it is made when only its state will fill it.
        states: how it is given its state.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        calls: Mapping[type, Callable[..., Any]],
        news: Mapping[type, Callable[..., Any]],
        states: Mapping[type, Callable[[Any, Any], None]],
    ):
        self.values = values
        self.calls = calls
        self.news = news
        self.states = states


class Machine:
    """Executes one pickle.

    Args:
        data: the pickle.
        table: what it may name.
        allowed: what it may name in addition, by qualified name; asked for when a name is not in the table.
        storage: makes what a persistent id stands for.
        protocols: the versions of the pickle format that are admitted. torch.save writes 2.
        beside: bytes of data that come with the pickle.
    """

    def __init__(
        self,
        data: bytes,
        table: Table,
        allowed: Callable[[], Mapping[str, Any]],
        storage: Callable[[Any], Any],
        protocols: Collection[int] = (2,),
        beside: int = 0,
    ):
        self._data = data
        self._table = table
        self._ask = allowed
        self._protocols = protocols
        self._allowed: Mapping[str, Any] | None = None
        self._storage = storage
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below each mark
        self._memo: dict[int, Any] = {}
        self._pending = 0
        self._left = _FREE + _TIMES * (len(data) + beside)

    def run(self) -> Any:
        """Return the object that the pickle describes.

        Raises:
            Refused: it asks for something that is not admitted.
            Exception: it is no whole pickle, or its values are refused by the types that they are of.
        """
        data = self._data
        if data[:1] != b"\x80" or data[1] not in self._protocols:
            which = " or ".join(map(str, self._protocols))
            raise Refused(f"its pickle is not of protocol {which}", self._refused_names())
        self._at = 2
        steps = _STEPS if data[1] == 2 else _NEWER_STEPS
        while True:
            code = data[self._at]
            self._at += 1
            step = steps.get(code)
            if step is not None:
                step(self)
            elif code == _STOP:
                return self._result()
            else:
                raise Refused(f"its pickle has the opcode {bytes([code])!r}", self._refused_names())

    def _result(self) -> Any:
        (value,) = self._stack
        if self._below or self._pending:
            raise Refused("its pickle does not end where its value does")
        return value

    @property
    def bytes_left(self) -> int:
        """Bytes behind the pickle."""
        return len(self._data) - self._at

    # What the pickle may name.

    def _find(self, module: str, name: str) -> Any:
        module, name = _renamed(module, name)
        full = f"{module}.{name}"
        if full in self._table.values:
            return self._table.values[full]
        allowed = self._trusted()
        if full in allowed and module not in _BLOCKED:
            return allowed[full]
        raise Refused(f"it names {full}", self._refused_names() or (full,))

    def _trusted(self) -> Mapping[str, Any]:
        if self._allowed is None:
            self._allowed = self._ask()
        return self._allowed

    def _is_trusted(self, thing: Any) -> bool:
        return any(thing is one for one in self._trusted().values())

    def _refused_names(self) -> tuple[str, ...]:
        known = {*self._table.values, *self._trusted()}
        return tuple(sorted(named_in(self._data) - known))

    # What it costs.

    def _charge(self, value: Any) -> None:
        """Count the bytes that a function may copy, hash or compute with when it is given a value.

        Raises:
            Refused: there have been too many.
        """
        level, left, depth = [value], self._left, 0
        while level and left >= 0 and depth < _LEVELS:
            inner: list[Any] = []
            for one in level:
                kind = type(one)
                if kind is tuple:
                    left -= len(one)
                    inner += one
                elif kind is str or kind is bytes:
                    left -= len(one)
                elif kind in _CONTAINERS:
                    left -= 8 * len(one)
                elif kind is int:
                    left -= one.bit_length() >> 3
                elif isinstance(one, torch.Tensor) and one.layout == torch.strided and one.device.type == "cpu":
                    most = max(MAX_EXPANDED, one.untyped_storage().nbytes())
                    left -= min(one.numel() * one.itemsize, most) >> 6
                elif isinstance(one, np.ndarray):
                    left -= one.nbytes
                if left < 0:
                    break
            level, depth = inner, depth + 1
        self._left = left
        if left < 0:
            raise Refused("its values are built from too many references to the same data")
        if level:
            raise Refused("a key, or what a type is made from, is nested too deep")

    def _hashable(self, key: Any) -> Any:
        if type(key) is not str:
            self._charge(key)
        return key

    # Opcodes.

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

    def global_(self) -> None:
        module = self._line()
        self._stack.append(self._find(module, self._line()))

    def stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise Refused("it names something without words")
        self._stack.append(self._find(module, name))

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
        self._take(8)  # tells readers of streams how much to read ahead

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

    def put1(self) -> None:
        self._put(self._octet())

    def put4(self) -> None:
        self._put(self._length())

    def memoize(self) -> None:
        self._put(len(self._memo))

    def _put(self, slot: int) -> None:
        value = self._memo[slot] = self._stack[-1]
        if type(value) is Pending:
            value.slots.append(slot)

    def get1(self) -> None:
        self._get(self._octet())

    def get4(self) -> None:
        self._get(self._length())

    def _get(self, slot: int) -> None:
        value = self._memo[slot]
        if type(value) is Pending:
            raise Refused("its pickle uses an object that is not finished")
        self._stack.append(value)

    def append(self) -> None:
        item = self._stack.pop()
        self._checked(_SEQUENCES).append(item)

    def appends(self) -> None:
        items = self._since_mark()
        self._checked(_SEQUENCES).extend(items)

    def setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._checked(_MAPPINGS)[self._hashable(key)] = value

    def setitems(self) -> None:
        items = self._since_mark()
        mapping = self._checked(_MAPPINGS)
        for key, value in zip(items[::2], items[1::2], strict=True):
            mapping[self._hashable(key)] = value

    def additems(self) -> None:
        items = self._since_mark()
        self._checked((set,)).update(map(self._hashable, items))

    def frozenset_(self) -> None:
        items = self._since_mark()
        self._stack.append(frozenset(map(self._hashable, items)))

    def _checked(self, kinds: tuple[type, ...]) -> Any:
        """What lies on top, if it is of one of these kinds or of one that the caller allows."""
        thing = self._stack[-1]
        if type(thing) in kinds or self._is_trusted(type(thing)):
            return thing
        raise Refused(f"it puts something into a {type(thing).__name__}")

    def reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack[-1]
        if type(arguments) is not tuple:
            raise Refused("it calls something without arguments")
        self._charge(arguments)
        for argument in arguments:
            if type(argument) is list:  # its elements may be hashed
                self._charge(tuple(argument))
        if type(function) is Maker:
            made = function.make(*arguments)
        elif isinstance(function, type) and function in self._table.calls:
            made = self._table.calls[function](*arguments)
        elif self._is_trusted(function):
            made = function(*arguments)
        else:
            raise Refused(f"it calls {_described(function)}")
        self._stack[-1] = self._counted(made)

    def newobj(self) -> None:
        arguments, cls = self._stack.pop(), self._stack[-1]
        if type(arguments) is not tuple or not isinstance(cls, type):
            raise Refused("it makes an object of something that is no class")
        if cls in self._table.news:
            made = self._table.news[cls](*arguments)
        elif self._is_trusted(cls):
            made = cls.__new__(cls, *arguments)
        else:
            raise Refused(f"it makes a {cls.__module__}.{cls.__qualname__} past its constructor")
        self._stack[-1] = self._counted(made)

    def _counted(self, made: Any) -> Any:
        self._pending += type(made) is Pending
        return made

    def build(self) -> None:
        state, thing = self._stack.pop(), self._stack[-1]
        self._charge(state)
        if type(thing) is Pending:
            made = self._stack[-1] = thing.finish(state)
            for slot in thing.slots:
                if self._memo[slot] is thing:
                    self._memo[slot] = made
            self._pending -= 1
        elif type(thing) in self._table.states:
            self._table.states[type(thing)](thing, state)
        elif self._is_trusted(type(thing)):
            _build(thing, state)
        else:
            raise Refused(f"it sets the state of {_described(thing)}")

    def persistent(self) -> None:
        self._stack.append(self._storage(self._stack.pop()))


def _described(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__module__}.{thing.__qualname__}"
    return f"a {type(thing).__name__}"


def _build(thing: Any, state: Any) -> None:
    """Set the state of an object whose class the caller allows, as pickle does."""
    if hasattr(thing, "__setstate__"):
        thing.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        vars(thing).update(state)
    for name, value in (slots or {}).items():
        setattr(thing, name, value)


def _pushes(make: Callable[[], Any]) -> Callable[[Machine], None]:
    def step(machine: Machine) -> None:
        machine._stack.append(make())

    return step


_STOP = ord(".")
_STEPS: dict[int, Callable[[Machine], None]] = {
    ord(code): step
    for code, step in {
        **{"(": Machine.mark, "0": Machine.pop, "1": Machine.pop_mark, "c": Machine.global_},
        **{"N": _pushes(lambda: None), "\x88": _pushes(lambda: True), "\x89": _pushes(lambda: False)},
        **{"]": _pushes(list), "}": _pushes(dict), ")": _pushes(tuple)},
        **{"J": Machine.int4, "M": Machine.int2, "K": Machine.int1, "\x8a": Machine.long1, "\x8b": Machine.long4},
        **{"G": Machine.float8, "X": Machine.text},
        **{"t": Machine.tuple_, "\x85": Machine.tuple1, "\x86": Machine.tuple2, "\x87": Machine.tuple3},
        **{"q": Machine.put1, "r": Machine.put4, "h": Machine.get1, "j": Machine.get4},
        **{"a": Machine.append, "e": Machine.appends, "s": Machine.setitem, "u": Machine.setitems},
        **{"R": Machine.reduce, "\x81": Machine.newobj, "b": Machine.build, "Q": Machine.persistent},
    }.items()
}

# Protocol 3 brought bytes, 4 the others.
_NEWER_STEPS: Mapping[int, Callable[[Machine], None]] = _STEPS | {
    **{0x95: Machine.frame, 0x93: Machine.stack_global, 0x94: Machine.memoize},
    **{0x8C: Machine.text1, 0x8D: Machine.text8},
    **{ord("C"): Machine.bytes1, ord("B"): Machine.bytes4, 0x8E: Machine.bytes8},
    **{0x8F: _pushes(set), 0x90: Machine.additems, 0x91: Machine.frozenset_},
}


def named_quickly(data: bytes) -> set[str]:
    """At least the names that ``named_in`` finds in a pickle of protocol 2, for a fraction of the time."""
    return {".".join(_renamed(*map(_decoded, pair))) for pair in _GLOBAL.findall(data)}


def _decoded(name: bytes) -> str:
    return name.decode(errors="replace")


_GLOBAL = re.compile(rb"c([^\n]*)\n([^\n]*)\n")


def named_in(data: bytes) -> set[str]:
    """Qualified names of classes and functions in a pickle of any protocol, as far as it can be read."""
    found: set[str] = set()
    strings: list[bytes] = []
    try:
        for name, argument in _skimmed(data):
            if name in ("GLOBAL", "INST"):
                found.add(".".join(_renamed(*argument.decode().split("\n")[:2])))
            elif name == "STACK_GLOBAL":
                found.add(b".".join(strings[-2:]).decode())
            elif name.startswith("EXT"):  # a number that the program has registered for a name
                code = int.from_bytes(argument, "little")
                registered = getattr(copyreg, "_inverted_registry", {})
                found.add(".".join(registered.get(code, ("copyreg", f"extension {code}"))))
            elif "UNICODE" in name:
                strings.append(argument)
    except (ValueError, IndexError):
        pass  # the names before the damage are what can be said
    return found


def _renamed(module: str, name: str) -> tuple[str, str]:
    """Python 3's name of what protocol 2 calls as Python 2 did."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _skimmed(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Each opcode's name and the bytes of its argument, without decoding them."""
    at = 0
    while at < len(data):
        op = _OPCODES.get(data[at])
        if op is None:
            return
        at += 1
        size = 0 if op.arg is None else op.arg.n
        if size == pickletools.UP_TO_NEWLINE:
            lines = 2 if op.name in ("GLOBAL", "INST") else 1
            end = at
            for _ in range(lines):
                end = data.index(b"\n", end) + 1
            size = end - at
        elif size < 0:  # the argument begins with its length
            width = _WIDTHS[size]
            size = int.from_bytes(data[at : at + width], "little")
            at += width
        yield op.name, data[at : at + size]
        at += size


_OPCODES = {ord(op.code): op for op in pickletools.opcodes}
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}

"""The pickle machine: executes a pickle without giving the pickle power over the program.

A pickle is a program for a stack machine. Python's machine calls whatever the pickle names, and sets attributes of
anything. This machine makes plain containers, and calls only the functions of its table, which check their arguments.
Types that the caller allows are called as Python's pickle would call them. The machine does not recurse, and needs time
and memory in proportion to the pickle (``budget``). It knows only the binary opcodes of protocols 2 to 5 that data
needs: https://docs.python.org/3/library/pickletools.html lists them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from torch_xla_ckpt.serialization.budget import CostBudget
from torch_xla_ckpt.serialization.pickle_names import names_in, python3_name
from torch_xla_ckpt.serialization.stack import StackMachine
from torch_xla_ckpt.serialization.table import CheckedFunction, Refused, Table, UnfinishedObject

# Modules from which nothing is admitted, even if the caller allows it.
_BLOCKED = ("sys", "os", "posix", "nt")

_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_SEQUENCES = (list, collections.deque)


class Machine(StackMachine):
    """Executes one pickle.

    Args:
        data: the pickle.
        table: the classes and functions that the pickle may name.
        allowed: returns further classes and functions by qualified name. Called for the first name that the table
            lacks.
        storage: returns the object for a persistent id.
        protocols: the admitted versions of the pickle format. Default: 2, which torch.save writes.
        extra_bytes: bytes of data that belong to the pickle, such as storages. They raise the cost limit. Default: 0.

    Attributes:
        steps: the function for each opcode of protocol 2.
    """

    steps: ClassVar[Mapping[int, Callable[[Any], None]]]

    def __init__(
        self,
        data: bytes,
        table: Table,
        allowed: Callable[[], Mapping[str, Any]],
        storage: Callable[[Any], Any],
        protocols: Collection[int] = (2,),
        extra_bytes: int = 0,
    ):
        super().__init__(data)
        self._table = table
        self._get_allowed = allowed
        self._protocols = protocols
        self._allowed: Mapping[str, Any] | None = None
        self._storage = storage
        self._unfinished = 0  # number of objects that lack their state
        self._budget = CostBudget(len(data) + extra_bytes)

    def run(self) -> Any:
        """Return the object that the pickle describes.

        Raises:
            Refused: the pickle requests something that is not admitted.
            Exception: the pickle is incomplete, or a type refuses the values of an instance.
        """
        data = self._data
        if data[:1] != b"\x80" or data[1] not in self._protocols:
            which = " or ".join(map(str, self._protocols))
            raise Refused(f"its pickle does not have protocol {which}", self._refused_names())
        self._at = 2
        steps = self.steps if data[1] == 2 else _NEWER_STEPS
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
        if self._below or self._unfinished:
            raise Refused("its pickle ends before its value is complete")
        return value

    # Names.

    def _find(self, module: str, name: str) -> Any:
        module, name = python3_name(module, name)
        full = f"{module}.{name}"
        if full in self._table.values:
            return self._table.values[full]
        allowed = self._trusted()
        if full in allowed and module not in _BLOCKED:
            return allowed[full]
        return self._missing(module, name)

    def _missing(self, module: str, name: str) -> Any:
        """Return what takes the place of something that is not admitted, or raise an error."""
        full = f"{module}.{name}"
        raise Refused(f"its pickle names {full}", self._refused_names() or (full,))

    def _trusted(self) -> Mapping[str, Any]:
        if self._allowed is None:
            self._allowed = self._get_allowed()
        return self._allowed

    def _is_trusted(self, value: Any) -> bool:
        return any(value is allowed for allowed in self._trusted().values())

    def _refused_names(self) -> tuple[str, ...]:
        known = {*self._table.values, *self._trusted()}
        return tuple(sorted(names_in(self._data) - known))

    def _hashable(self, key: Any) -> Any:
        if type(key) is not str:
            self._budget.charge(key)
        return key

    # Opcodes.

    def global_(self) -> None:
        module = self._line()
        self._stack.append(self._find(module, self._line()))

    def stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise Refused("its pickle names something by a value that is no string")
        self._stack.append(self._find(module, name))

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
        """Return the top of the stack if its type is one of ``kinds`` or allowed by the caller."""
        top = self._stack[-1]
        if type(top) in kinds or self._is_trusted(type(top)):
            return top
        raise Refused(f"its pickle adds elements to a {type(top).__name__}")

    def reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack[-1]
        if type(arguments) is not tuple:
            raise Refused("its pickle calls a function without a tuple of arguments")
        self._budget.charge(arguments)
        for argument in arguments:
            if type(argument) is list:  # its elements may be hashed
                self._budget.charge(tuple(argument))
        if type(function) is CheckedFunction:
            made = function.make(*arguments)
        elif isinstance(function, type) and function in self._table.calls:
            made = self._table.calls[function](*arguments)
        elif self._is_trusted(function):
            made = function(*arguments)
        else:
            raise Refused(f"its pickle calls {_described(function)}")
        self._stack[-1] = self._counted(made)

    def newobj(self) -> None:
        arguments, cls = self._stack.pop(), self._stack[-1]
        if type(arguments) is not tuple or not isinstance(cls, type):
            raise Refused("its pickle makes an instance of something that is no class")
        if cls in self._table.news:
            made = self._table.news[cls](*arguments)
        elif self._is_trusted(cls):
            made = cls.__new__(cls, *arguments)
        else:
            raise Refused(f"its pickle makes a {cls.__module__}.{cls.__qualname__} without calling its constructor")
        self._stack[-1] = self._counted(made)

    def _counted(self, made: Any) -> Any:
        self._unfinished += type(made) is UnfinishedObject
        return made

    def build(self) -> None:
        state, instance = self._stack.pop(), self._stack[-1]
        self._budget.charge(state)
        if type(instance) is UnfinishedObject:
            made = self._stack[-1] = instance.finish(state)
            for slot in instance.slots:
                if self._memo[slot] is instance:
                    self._memo[slot] = made
            self._unfinished -= 1
        elif type(instance) in self._table.states:
            self._table.states[type(instance)](instance, state)
        elif self._is_trusted(type(instance)):
            _set_state(instance, state)
        else:
            raise Refused(f"its pickle sets the state of {_described(instance)}")

    def persistent(self) -> None:
        self._stack.append(self._storage(self._stack.pop()))


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    return f"a {type(value).__name__}"


def _set_state(instance: Any, state: Any) -> None:
    """Set the state of an instance whose class the caller allows, as Python's pickle does."""
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        vars(instance).update(state)
    for name, value in (slots or {}).items():
        setattr(instance, name, value)


def _pushes(make: Callable[[], Any]) -> Callable[[Machine], None]:
    """Return the step of an opcode that pushes a new value."""

    def step(machine: Machine) -> None:
        machine._stack.append(make())

    return step


_STOP = ord(".")
STEPS: dict[int, Callable[[Any], None]] = {
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

"""The function for each opcode of protocol 2."""
Machine.steps = STEPS

# Protocol 3 added bytes, and protocol 4 the others.
_NEWER_STEPS: Mapping[int, Callable[[Any], None]] = STEPS | {
    **{0x95: Machine.frame, 0x93: Machine.stack_global, 0x94: Machine.memoize},
    **{0x8C: Machine.text1, 0x8D: Machine.text8},
    **{ord("C"): Machine.bytes1, ord("B"): Machine.bytes4, 0x8E: Machine.bytes8},
    **{0x8F: _pushes(set), 0x90: Machine.additems, 0x91: Machine.frozenset_},
}

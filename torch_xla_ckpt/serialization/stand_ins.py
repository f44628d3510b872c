"""A pickle machine that puts a stand-in in the place of each object that the tables do not admit.

So the weights in a file can be read beside an object whose class this program does not know. Nothing of such an object
is made or called: its arguments and its state are dropped.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, NoReturn

from torch_xla_ckpt.serialization.machine import STEPS, Machine

# Functions that no honest state names. A file that names one of them is an attack, and nothing of it is read.
_ATTACKS = frozenset(
    {
        *("asyncio", "bdb", "code", "codeop", "commands", "ctypes", "http", "importlib", "marshal", "multiprocessing"),
        *("nt", "os", "pdb", "pickle", "posix", "pty", "runpy", "shutil", "socket", "subprocess", "sys", "timeit"),
        *("urllib", "webbrowser"),
    }
)
_ATTACKS_BY_NAME = frozenset({"_io.FileIO", "_io.open", "io.FileIO", "io.open"})
_HONEST_BUILTINS = frozenset(
    {
        *("classmethod", "enumerate", "filter", "getattr", "iter", "map", "object", "property", "reversed"),
        *("staticmethod", "type", "zip"),
    }
)
_LOOKED_AT = 1000  # values among which a stand-in is looked for, so that a pickle cannot make this slow


class Unknown(Exception):
    """A stand-in was used where a value is needed.

    Attributes:
        name: the qualified name of the class or function that no table admits.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class StandIn:
    """Stands for an object, a class or a function that no table admits.

    Args:
        name: the qualified name of the class or function.
    """

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"<stand-in for {self.name}>"

    def __reduce__(self) -> NoReturn:
        raise Unknown(self.name)


class StandInMachine(Machine):
    """Executes one pickle, and makes a ``StandIn`` of each object that the tables do not admit; see ``Machine``."""

    def _missing(self, module: str, name: str) -> Any:
        return super()._missing(module, name) if _is_attack(module, name) else StandIn(f"{module}.{name}")

    def reduce(self) -> None:
        arguments, function = self._stack[-1], self._stack[-2]
        if type(function) is StandIn:
            self._stack[-2:] = [StandIn(function.name)]
            return
        try:
            super().reduce()
        except Exception:  # a stand-in among the arguments, as in defaultdict(UnknownClass)
            found = _stand_in_among(arguments)
            if found is None:
                raise
            self._stack[-1] = StandIn(found.name)

    def newobj(self) -> None:
        if type(self._stack[-2]) is StandIn:
            self._stack[-2:] = [StandIn(self._stack[-2].name)]
        else:
            super().newobj()

    def build(self) -> None:
        if type(self._stack[-2]) is StandIn:
            self._stack.pop()
        else:
            super().build()

    def append(self) -> None:
        if type(self._stack[-2]) is StandIn:
            self._stack.pop()
        else:
            super().append()

    def setitem(self) -> None:
        if type(self._stack[-3]) is StandIn:
            del self._stack[-2:]
        else:
            super().setitem()

    def appends(self) -> None:
        if type(self._below[-1][-1]) is StandIn:
            self._since_mark()
        else:
            super().appends()

    def setitems(self) -> None:
        if type(self._below[-1][-1]) is StandIn:
            self._since_mark()
        else:
            super().setitems()


StandInMachine.steps = STEPS | {
    ord(code): step
    for code, step in {
        **{"R": StandInMachine.reduce, "\x81": StandInMachine.newobj, "b": StandInMachine.build},
        **{"a": StandInMachine.append, "e": StandInMachine.appends},
        **{"s": StandInMachine.setitem, "u": StandInMachine.setitems},
    }.items()
}


def _is_attack(module: str, name: str) -> bool:
    """Whether no honest state names this function."""
    if module == "builtins":  # the names of exceptions begin with a capital letter
        return name not in _HONEST_BUILTINS and not name[:1].isupper()
    return module.partition(".")[0] in _ATTACKS or f"{module}.{name}" in _ATTACKS_BY_NAME


def _stand_in_among(values: Any) -> StandIn | None:
    """Return a stand-in in nested tuples and lists; None if there is none among the first values."""
    waiting, left = [iter((values,))], _LOOKED_AT
    while waiting and left > 0:
        for one in islice(waiting.pop(), left):
            left -= 1
            if type(one) is StandIn:
                return one
            if type(one) in (tuple, list):
                waiting.append(iter(one))
    return None

"""Tables of the classes and functions that a pickle may name, and how their instances are made.

Each entry is a function that checks its arguments. What is in no table is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any


class Refused(pickle.UnpicklingError):
    """A pickle requests something that no table admits.

    Attributes:
        names: qualified names that are not admitted.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()):
        super().__init__(message)
        self.names = names


class CheckedFunction:
    """The stand-in for a function that a pickle names. Only the machine can call it."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any]):
        self.name = name
        self.make = make

    def __repr__(self) -> str:
        return f"<{self.name}, which only a pickle can call>"


class UnfinishedObject:
    """An object that is made when its state is known. Until then a pickle cannot use it.

    Args:
        finish: makes the object from its state.
    """

    def __init__(self, finish: Callable[[Any], Any]):
        self.finish = finish
        self.slots: list[int] = []  # slots of the memo that refer to the object


class Table:
    """Everything that a pickle may name.

    Args:
        values: the class, constant or ``CheckedFunction`` for each qualified name.
        calls: for each class that may be called, the function that makes an instance from arguments.
        news: for each class that may be made past its constructor, the function that makes an empty instance.
        states: for each class, the function that sets the state of an instance.
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

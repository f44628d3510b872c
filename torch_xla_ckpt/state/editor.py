"""Edits of a state dict that can be undone: new values where it has none, and replaced values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch_xla_ckpt._dcp import IntegerKey
from torch_xla_ckpt.state.tree import Leaf, Path, is_open, is_placeholder

_MAX_DIGITS = 4000  # Python converts no longer text to an integer


class Closed(Mapping[str, Any]):
    """A mapping whose values can be replaced, and which takes no new keys, such as the state of a built module."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._values:
            raise KeyError(key)
        self._values[key] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class StateDictEditor:
    """Inserts values into a state dict and replaces values. ``undo`` reverts all edits.

    Args:
        state_dict: nested mappings and lists. ``insert`` creates missing containers: a list where the next element of
            the path is a position, otherwise a dict. Mappings that are not mutable take no new values.
        integers: returns whether the keys of the mapping at a path are integers, although the path has strings. Asked
            only for mappings that are empty or will be created. Default: they are strings.
    """

    def __init__(self, state_dict: MutableMapping[Any, Any], integers: Callable[[Path], bool] = lambda path: False):
        self._root = state_dict
        self._integers = integers
        self._planned_length: dict[int | Path, int] = {}  # of lists: by id, or by path if the list does not exist yet
        self._other_keys: dict[int, dict[str, Any]] = {}  # keys that are no strings or integers, by the mapping's id
        self._undo: list[Callable[[], None]] = []

    def has_room(self, path: Path) -> bool:
        """Whether ``insert`` can put a value at ``path``. Ask for the positions of a list in ascending order."""
        here: Any = self._root
        for depth, element in enumerate(path):
            if depth and _can_be_replaced(here):
                return self._plan_containers(path[:depth], path[depth:])
            if isinstance(here, MutableMapping) and not isinstance(element, int):
                slot = self._slot(here, element)
                if slot is None:
                    return self._plan_containers(path[: depth + 1], path[depth + 1 :])
                here = here[slot]
            elif isinstance(here, list) and is_open(here) and isinstance(element, int):
                length = max(len(here), self._planned_length.get(id(here), 0))
                if element >= len(here):
                    if element > length:
                        return False
                    self._planned_length[id(here)] = element + 1
                    return self._plan_containers(path[: depth + 1], path[depth + 1 :])
                here = here[element]
            else:
                return False
        return _can_be_replaced(here)

    def _plan_containers(self, path: Path, rest: Path) -> bool:
        """Whether the new containers from ``path`` along ``rest`` can be created: their lists must have no gaps."""
        return all(self._plan_element((*path, *rest[:n]), element) for n, element in enumerate(rest))

    def _plan_element(self, path: Path, element: str | int) -> bool:
        if not isinstance(element, int):
            return True
        length = self._planned_length.get(path, 0)
        self._planned_length[path] = max(length, element + 1)
        return element <= length

    def insert(self, values: Iterable[tuple[Path, Any]]) -> None:
        """Put values at paths that have room. Positions of a list must ascend. Containers may refuse a value."""
        for path, value in values:
            self._insert(path, value)

    def replace(self, leaf: Leaf, value: Any) -> None:
        """Replace the value of a leaf."""
        self._set(leaf.container, leaf.slot, value, exists=True)

    def undo(self) -> None:
        """Remove inserted values, and put replaced values back."""
        while self._undo:
            self._undo.pop()()

    def _insert(self, path: Path, value: Any) -> None:
        here: Any = self._root
        for depth, element in enumerate(path):
            last = depth == len(path) - 1
            slot: Any = element
            if isinstance(here, MutableMapping):
                found = self._slot(here, element)
                slot = self._new_slot(here, path[:depth], element) if found is None else found
                exists = found is not None
            else:
                exists = int(element) < len(here)
            if last:
                self._set(here, slot, value, exists)
                return
            make, kind = (list, list) if isinstance(path[depth + 1], int) else (dict, MutableMapping)
            current = here[slot] if exists else None
            if _can_be_replaced(current) and not isinstance(current, kind):
                self._set(here, slot, make(), exists)
            here = here[slot]

    def _slot(self, mapping: Mapping[Any, Any], element: str | int) -> Any:
        """Return the key of a mapping that a path's element stands for; None if the mapping does not have it."""
        text = str(element)
        if text in mapping:
            return text
        if _is_decimal(text) and int(text) in mapping:
            return int(text)
        if id(mapping) not in self._other_keys:
            self._other_keys[id(mapping)] = {str(key): key for key in mapping if type(key) not in (str, int)}
        return self._other_keys[id(mapping)].get(text)

    def _new_slot(self, mapping: MutableMapping[Any, Any], path: Path, element: str | int) -> Any:
        if isinstance(element, IntegerKey) or (_is_decimal(element) and self._has_integer_keys(mapping, path)):
            return int(element)
        return str(element)

    def _has_integer_keys(self, mapping: MutableMapping[Any, Any], path: Path) -> bool:
        if not mapping:
            return self._integers(path)
        return type(next(iter(mapping))) is int

    def _set(self, container: Any, slot: Any, value: Any, exists: bool) -> None:
        if exists:
            old = container[slot]
            container[slot] = value
            self._undo.append(lambda: container.__setitem__(slot, old))
        elif isinstance(container, list):
            container.append(value)
            self._undo.append(container.pop)
        else:
            container[slot] = value
            self._undo.append(lambda: container.__delitem__(slot))


def _can_be_replaced(value: Any) -> bool:
    return is_placeholder(value) or (isinstance(value, MutableMapping) and not value)


def _is_decimal(element: str | int) -> bool:
    """Whether an element is the text of an integer, as ``str`` writes it."""
    if not isinstance(element, str) or len(element) > _MAX_DIGITS or not element.removeprefix("-").isdecimal():
        return False
    return str(int(element)) == element

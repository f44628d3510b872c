"""Flattening a state dict into keys, the way DCP names them, and putting values where the state dict has none.

Keys are DCP's: path elements joined by dots; mappings always open, lists only when they hold tensors or containers
that open; everything else, tuples too, is one leaf. Unlike DCP's own flattening, a leaf remembers the container it
came from, so that putting a value back works for keys that are not strings (optimizer state is keyed by integers).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_xla_ckpt._dcp import IntegerKey
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.serialization import MAX_DEPTH

Path = tuple[str | int, ...]
"""Elements of a key: positions in lists are integers, keys of mappings are strings."""

_DIGITS = 4000  # Python makes no longer integers from text


class Closed(Mapping[str, Any]):
    """A mapping whose values can be replaced, and that takes no new keys: the state of something that is built."""

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


class Leaf(NamedTuple):
    """A value of a state dict and where it lies.

    ``path`` is the key's elements as DCP records them (every mapping key as a string); ``slot`` is the real key or
    position in ``container``.
    """

    path: Path
    value: Any
    container: Any
    slot: Any

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


def flatten(
    state_dict: Mapping[Any, Any],
    whole: Container[str] = (),
    *,
    with_empty: bool = False,
    deepest: int | None = None,
) -> dict[str, Leaf]:
    """The leaves of a state dict by key.

    Args:
        state_dict: nested mappings and lists.
        whole: keys of containers that stay one leaf if no tensor is in them. torch_xla's planners, and DCP up to 2.3,
            save a dict without tensors as one object.
        with_empty: make a leaf of an empty mapping too. DCP drops it; then nothing tells that it was there.
        deepest: levels of containers that there may be; None for any number.

    Raises:
        CheckpointError: two leaves have the same key, a container contains itself, or there are more levels.
    """
    leaves: dict[str, Leaf] = {}
    for leaf in _leaves(state_dict, whole, with_empty, deepest):
        key = key_of(leaf.path)
        if key in leaves:
            raise CheckpointError(
                f"two values of the state dict have the key {key!r}: at {leaves[key].path} and at {leaf.path}. "
                "Keys are paths joined by dots; rename one of them"
            )
        leaves[key] = leaf
    return leaves


def mapped(state_dict: Mapping[Any, Any], change: Callable[[Leaf], Any]) -> dict[Any, Any]:
    """A state dict of the same shape in containers of its own, whose leaves are changed.

    What a leaf is changed into must be one: no mapping, and a tensor only if it was one.

    Raises:
        CheckpointError: a container contains itself, or there are more than ``MAX_DEPTH`` levels.
    """
    root: dict[Any, Any] = {}
    made: dict[int, Any] = {id(state_dict): root}  # of each container that was opened, by its id
    held: list[Any] = []  # ids stay those of these containers
    for step in _walk(state_dict, MAX_DEPTH):
        _, value, container, slot = step.leaf
        new: Any
        if step.opens:
            new = made[id(value)] = {} if isinstance(value, Mapping) else []
            held.append(value)
            step.open()
        else:
            new = change(step.leaf)
        into = made[id(container)]
        if isinstance(into, list):
            into.append(new)
        else:
            into[slot] = new
    return root


def key_of(path: Path) -> str:
    """DCP's name of what lies at ``path``."""
    return ".".join(map(str, path))


def is_placeholder(value: Any) -> bool:
    """Whether a leaf stands for something that has not been built yet."""
    return value is None or (type(value) is list and not value)


class StateDictEditor:
    """Values to be put where a state dict has nothing; all that was done can be undone.

    Args:
        state_dict: nested mappings and lists. What is missing between it and a value is made: dicts, and lists where
            the path has a position. Mappings that are not mutable have no room.
        integers: whether the keys of a mapping at a path, which is about to be made or is empty, are integers
            although the path has strings.
    """

    def __init__(self, state_dict: MutableMapping[Any, Any], integers: Callable[[Path], bool] = lambda path: False):
        self._root = state_dict
        self._integers = integers
        self._grown: dict[int | Path, int] = {}  # length that a list will have, by its id, or its path if it is new
        self._odd: dict[int, dict[str, Any]] = {}  # keys that are no strings and no integers, by the mapping's id
        self._changes: list[Callable[[], None]] = []  # that undo what was done

    def has_room(self, path: Path) -> bool:
        """Whether ``insert`` could put something there. Positions of a list are to be asked for in ascending order."""
        here: Any = self._root
        for depth, element in enumerate(path):
            if depth and _gives_way(here):
                return self._all_start(path[:depth], path[depth:])
            if isinstance(here, MutableMapping) and not isinstance(element, int):
                slot = self._slot(here, element)
                if slot is None:
                    return self._all_start(path[: depth + 1], path[depth + 1 :])
                here = here[slot]
            elif isinstance(here, list) and _opens(here) and isinstance(element, int):
                length = max(len(here), self._grown.get(id(here), 0))
                if element >= len(here):
                    if element > length:
                        return False
                    self._grown[id(here)] = element + 1
                    return self._all_start(path[: depth + 1], path[depth + 1 :])
                here = here[element]
            else:
                return False
        return _gives_way(here)

    def _all_start(self, path: Path, rest: Path) -> bool:
        return all(self._starts((*path, *rest[:n]), element) for n, element in enumerate(rest))

    def _starts(self, path: Path, element: str | int) -> bool:
        """Whether a list that will be made at ``path`` gets its elements in order."""
        if not isinstance(element, int):
            return True
        length = self._grown.get(path, 0)
        self._grown[path] = max(length, element + 1)
        return element <= length

    def insert(self, values: Iterable[tuple[Path, Any]]) -> None:
        """Put values at paths for which there was room, in ascending order; containers may refuse them."""
        for path, value in values:
            self._insert(path, value)

    def replace(self, leaf: Leaf, value: Any) -> None:
        """Put ``value`` in the place of a leaf."""
        self._set(leaf.container, leaf.slot, value, True)

    def undo(self) -> None:
        """Take out what was put in, and put back what it replaced."""
        while self._changes:
            self._changes.pop()()

    def _insert(self, path: Path, value: Any) -> None:
        here: Any = self._root
        for depth, element in enumerate(path):
            last = depth == len(path) - 1
            slot: Any = element
            if isinstance(here, MutableMapping):
                found = self._slot(here, element)
                slot = self._new_slot(here, path[:depth], element) if found is None else found
                there = found is not None
            else:
                there = int(element) < len(here)
            if last:
                self._set(here, slot, value, there)
                return
            make, kind = (list, list) if isinstance(path[depth + 1], int) else (dict, MutableMapping)
            current = here[slot] if there else None
            if _gives_way(current) and not isinstance(current, kind):
                self._set(here, slot, make(), there)
            here = here[slot]

    def _slot(self, mapping: Mapping[Any, Any], element: str | int) -> Any:
        """The key of a mapping that a path's element stands for, if it is there."""
        text = str(element)
        if text in mapping:
            return text
        if _is_decimal(text) and int(text) in mapping:
            return int(text)
        if id(mapping) not in self._odd:
            self._odd[id(mapping)] = {str(key): key for key in mapping if type(key) not in (str, int)}
        return self._odd[id(mapping)].get(text)

    def _new_slot(self, mapping: MutableMapping[Any, Any], path: Path, element: str | int) -> Any:
        if isinstance(element, IntegerKey) or (_is_decimal(element) and self._has_integers(mapping, path)):
            return int(element)
        return str(element)

    def _has_integers(self, mapping: MutableMapping[Any, Any], path: Path) -> bool:
        if not mapping:
            return self._integers(path)
        return type(next(iter(mapping))) is int

    def _set(self, container: Any, slot: Any, value: Any, there: bool) -> None:
        if there:
            old = container[slot]
            container[slot] = value
            self._changes.append(lambda: container.__setitem__(slot, old))
        elif isinstance(container, list):
            container.append(value)
            self._changes.append(container.pop)
        else:
            container[slot] = value
            self._changes.append(lambda: container.__delitem__(slot))


def _gives_way(value: Any) -> bool:
    return is_placeholder(value) or (isinstance(value, MutableMapping) and not value)


def _is_decimal(element: str | int) -> bool:
    if not isinstance(element, str) or len(element) > _DIGITS or not element.removeprefix("-").isdecimal():
        return False
    return str(int(element)) == element


def _leaves(
    state_dict: Mapping[Any, Any], whole: Container[str], with_empty: bool, deepest: int | None
) -> Iterator[Leaf]:
    for step in _walk(state_dict, deepest):
        path, value, container, slot = step.leaf
        if not step.opens or (key_of(path) in whole and _is_plain(value)):
            yield step.leaf
        elif value:
            step.open()
        elif with_empty:
            yield Leaf(path, {}, container, slot)


class _Step:
    """A value that ``_walk`` has come to. If it is a container, ``open`` has the walk go into it next."""

    def __init__(self, leaf: Leaf, opens: bool, open: Callable[[], None]):
        self.leaf = leaf
        self.opens = opens
        self.open = open


def _walk(state_dict: Mapping[Any, Any], deepest: int | None) -> Iterator[_Step]:
    """Visit the values of a state dict, without recursion: Python allows little of it.

    Raises:
        CheckpointError: a container that is opened contains itself, or lies deeper than ``deepest``.
    """
    stack: list[tuple[Path, Any, Iterator[tuple[Any, Any]]]] = []
    inside: set[int] = set()

    def enter(path: Path, container: Any) -> None:
        if id(container) in inside:
            raise CheckpointError(
                f"the state dict contains itself at {_shown(path)}. Keys are paths, and this one would never end: "
                "take the reference out of the state dict"
            )
        if deepest is not None and len(stack) >= deepest:
            raise CheckpointError(
                f"the state dict is nested more than {deepest} levels deep at {_shown(path)}. Flatten it, or put the "
                "inner part in by itself"
            )
        inside.add(id(container))
        slots = container.items() if isinstance(container, Mapping) else enumerate(container)
        stack.append((path, container, iter(slots)))

    enter((), state_dict)
    while stack:
        path, container, slots = stack[-1]
        try:
            slot, value = next(slots)
        except StopIteration:
            stack.pop()
            inside.remove(id(container))
            continue
        here = (*path, _element(slot) if isinstance(container, Mapping) else slot)
        opens = not isinstance(value, torch.Tensor) and _opens(value)
        yield _Step(Leaf(here, value, container, slot), opens, partial(enter, here, value))


def _shown(path: Path) -> str:
    key = key_of(path)
    return repr(key) if len(key) <= 200 else f"{key[:200]!r}..."


def _element(slot: Any) -> str:
    return IntegerKey(slot) if type(slot) is int else str(slot)


def _is_plain(container: Any) -> bool:
    """Whether there is no tensor in a mapping or list."""
    return not any(isinstance(value, torch.Tensor) for value in _inside(container, Mapping | list))


def _opens(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(one, (torch.Tensor, Mapping)) for one in _inside(value, list))


def _inside(container: Any, kinds: Any) -> Iterator[Any]:
    """All values in a container and in the containers of these kinds that it contains."""
    waiting, seen = [container], {id(container)}
    while waiting:
        one = waiting.pop()
        for value in one.values() if isinstance(one, Mapping) else one:
            yield value
            if isinstance(value, kinds) and not isinstance(value, torch.Tensor) and id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)

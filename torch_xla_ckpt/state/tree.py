"""Keys of a state dict, named as DCP names them.

A key is a path joined by dots. Mappings are always opened. Lists are opened if they hold tensors, mappings, or lists
that are opened. Every other value, also a tuple, is one leaf. Unlike DCP's flattening, a leaf knows its container, so
that values can be replaced under keys that are not strings: optimizer state is keyed by integers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from torch_xla_ckpt._dcp import IntegerKey
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.serialization import MAX_DEPTH

Path = tuple[str | int, ...]
"""Elements of a key: positions in lists are integers, keys of mappings are strings."""


class Leaf(NamedTuple):
    """A value of a state dict.

    Args:
        path: the elements of its key as DCP records them, with every key of a mapping as a string.
        value: the value.
        container: the mapping or list that holds the value.
        slot: the key or position of the value in ``container``.
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
    """Return the leaves of a state dict by key.

    Args:
        state_dict: nested mappings and lists.
        whole: keys of containers that stay one leaf if they hold no tensor. torch_xla's planners, and DCP up to 2.3,
            save a dict without tensors as one object.
        with_empty: make a leaf of each empty mapping, so that the checkpoint records it. DCP drops empty mappings.
        deepest: maximum number of nested containers; default: no limit.

    Raises:
        CheckpointError: two leaves have the same key, a container contains itself, or containers are nested deeper
            than ``deepest``.
    """
    leaves: dict[str, Leaf] = {}
    for leaf in _leaves(state_dict, whole, with_empty, deepest):
        key = key_of(leaf.path)
        if key in leaves:
            raise CheckpointError(
                f"two values of the state dict have the key {key!r}: at {leaves[key].path} and at {leaf.path}. "
                "A key is a path joined by dots. Rename one of the two"
            )
        leaves[key] = leaf
    return leaves


def mapped(state_dict: Mapping[Any, Any], change: Callable[[Leaf], Any]) -> dict[Any, Any]:
    """Return a copy of a state dict with new containers and changed leaves.

    Args:
        state_dict: nested mappings and lists.
        change: returns the new value of a leaf. The new value must not be a mapping, and a tensor only for a tensor.

    Raises:
        CheckpointError: a container contains itself, or there are more than ``MAX_DEPTH`` levels.
    """
    root: dict[Any, Any] = {}
    made: dict[int, Any] = {id(state_dict): root}  # the copy of each opened container, by the container's id
    held: list[Any] = []  # keeps opened containers alive, so that no other object gets their ids
    for step in _walk(state_dict, MAX_DEPTH):
        _, value, container, slot = step.leaf
        new: Any
        if step.is_open:
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
    """Return DCP's key for a path."""
    return ".".join(map(str, path))


def is_placeholder(value: Any) -> bool:
    """Whether a leaf stands for a value that the program has not built yet: None or an empty list."""
    return value is None or (type(value) is list and not value)


def _leaves(
    state_dict: Mapping[Any, Any], whole: Container[str], with_empty: bool, deepest: int | None
) -> Iterator[Leaf]:
    for step in _walk(state_dict, deepest):
        path, value, container, slot = step.leaf
        if not step.is_open or (key_of(path) in whole and _is_plain(value)):
            yield step.leaf
        elif value:
            step.open()
        elif with_empty:
            yield Leaf(path, {}, container, slot)


class _Step:
    """A value that ``_walk`` visits.

    Args:
        leaf: the value.
        is_open: whether the value is a container whose values have keys of their own.
        open: makes ``_walk`` visit the container's values next.
    """

    def __init__(self, leaf: Leaf, is_open: bool, open: Callable[[], None]):
        self.leaf = leaf
        self.is_open = is_open
        self.open = open


def _walk(state_dict: Mapping[Any, Any], deepest: int | None) -> Iterator[_Step]:
    """Visit the values of a state dict. Without recursion, which Python limits to about a thousand levels.

    Raises:
        CheckpointError: an opened container contains itself, is nested deeper than ``deepest``, or does not tell its
            values.
    """
    stack: list[tuple[Path, Any, Iterator[tuple[Any, Any]]]] = []
    inside: set[int] = set()

    def enter(path: Path, container: Any) -> None:
        if id(container) in inside:
            raise CheckpointError(
                f"the state dict contains itself at {_shown(path)}. The path of a value inside would never end. "
                "Remove this reference from the state dict"
            )
        if deepest is not None and len(stack) >= deepest:
            raise CheckpointError(
                f"the state dict is nested more than {deepest} levels deep at {_shown(path)}. Flatten it, or save the "
                "inner part under a key of its own"
            )
        inside.add(id(container))
        try:
            slots = iter(container.items() if isinstance(container, Mapping) else enumerate(container))
        except Exception as error:
            raise _unlistable(path, container, error) from error
        stack.append((path, container, slots))

    enter((), state_dict)
    while stack:
        path, container, slots = stack[-1]
        try:
            slot, value = next(slots)
        except StopIteration:
            stack.pop()
            inside.remove(id(container))
            continue
        except Exception as error:  # a RuntimeError if another thread changes the mapping
            raise _unlistable(path, container, error) from error
        here = (*path, _element(slot) if isinstance(container, Mapping) else slot)
        opened = not isinstance(value, torch.Tensor) and is_open(value)
        yield _Step(Leaf(here, value, container, slot), opened, partial(enter, here, value))


def _unlistable(path: Path, container: Any, error: Exception) -> CheckpointError:
    """Return the error for a container that does not tell its values."""
    where = f"at {_shown(path)}" if path else "that was passed"
    return CheckpointError(
        f"the values of the {type(container).__name__} {where} could not be listed ({type(error).__name__}: {error}). "
        "If another thread changes it, let that thread wait during the call, or pass a copy"
    )


def _shown(path: Path) -> str:
    key = key_of(path)
    return repr(key) if len(key) <= 200 else f"{key[:200]!r}..."


def _element(slot: Any) -> str:
    return IntegerKey(slot) if type(slot) is int else str(slot)


def _is_plain(container: Any) -> bool:
    """Whether a mapping or list holds no tensor, at any depth."""
    return not any(isinstance(value, torch.Tensor) for value in _inside(container, Mapping | list))


def is_open(value: Any) -> bool:
    """Whether the values in ``value`` have keys of their own."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(isinstance(one, (torch.Tensor, Mapping)) for one in _inside(value, list))


def _inside(container: Any, kinds: Any) -> Iterator[Any]:
    """Yield all values in a container, and in the containers of these kinds inside it."""
    waiting, seen = [container], {id(container)}
    while waiting:
        one = waiting.pop()
        for value in one.values() if isinstance(one, Mapping) else one:
            yield value
            if isinstance(value, kinds) and not isinstance(value, torch.Tensor) and id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)

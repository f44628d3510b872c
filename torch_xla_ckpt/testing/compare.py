"""Two states, walked side by side."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.device import access_of
from torch_xla_ckpt.state import lay_out
from torch_xla_ckpt.testing.elements import bits_of, element_text, first_difference, rows_of_array, shown, two_values
from torch_xla_ckpt.testing.tensors import tensor_difference

_MOST_SHOWN = 12
"""Keys that an error lists."""


def assert_same_state(a: Any, b: Any) -> None:
    """Show that two states are the same, bit by bit.

    Tensors are the same if they have the same shape, dtype and bits. NaNs with other payloads differ, and so do 0.0 and
    -0.0. Device and sharding do not count: a sharded XLA tensor can equal a tensor in host memory, a DTensor, or an XLA
    tensor on another mesh. Shards are fetched to the host; nothing is gathered on devices. Of several replicas of a
    shard, one is compared.

    Mappings are the same if they have the same keys with the same values, in any order. An object with ``state_dict``
    is compared by its state dict, and any other object by what pickle would save of it.

    With several ranks, each rank compares the shards that it holds, and raises its own error.

    Args:
        a, b: the states: nested mappings, lists, tensors, modules, optimizers, objects. For example a module, or a
            dict for ``torch_xla_ckpt.save``.

    Raises:
        AssertionError: the states differ. The message lists up to 12 differing keys, each with what differs: the type,
            the shape, the dtype, the first differing element, or that one state lacks the key.
        ValueError: this rank holds different regions of two tensors, so that it cannot compare them.
        CheckpointError: a tensor is of a kind that cannot be saved, for example sparse.
    """
    differences = _differences(a, b)
    if not differences:
        return
    lines = [f"  {difference.key or '(the state itself)'}: {difference.text}" for difference in differences]
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"  and {len(lines) - _MOST_SHOWN} more"]
    keys = "1 key" if len(differences) == 1 else f"{len(differences)} keys"
    raise AssertionError("\n".join([f"the states differ in {keys} (first state, then second state):", *lines]))


class _Difference(NamedTuple):
    """A key under which the states differ.

    Args:
        position: the key's number in the order in which the states were walked.
        key: path elements joined by dots, as in a checkpoint.
        text: what differs.
    """

    position: int
    key: str
    text: str


class _Pair(NamedTuple):
    key: str
    a: Any
    b: Any


def _differences(a: Any, b: Any) -> list[_Difference]:
    """Return the first difference of each key, in the order of the states."""
    walk = _Walk(a, b)
    walk.run()
    return sorted([*walk.differences, *_tensor_differences(walk.tensors)])


class _Walk:
    """Visits two states side by side. Collects differences of values, and the pairs of tensors.

    Attributes:
        differences: differences of values that are not tensors, and of shapes and dtypes.
        tensors: pairs of tensors with the same shape and dtype, by their position.
    """

    def __init__(self, a: Any, b: Any):
        self.differences: list[_Difference] = []
        self.tensors: dict[int, _Pair] = {}
        self._waiting = [_Pair("", a, b)]  # not a recursion, because states may be nested deeper than Python's limit
        self._visited: dict[tuple[int, int], _Pair] = {}  # by the ids of both values, which it keeps alive
        self._position = 0

    def run(self) -> None:
        while self._waiting:
            pair = self._waiting.pop()
            self._position += 1
            ids = id(pair.a), id(pair.b)
            if pair.a is not pair.b and ids not in self._visited:
                self._visited[ids] = pair
                self._visit(pair)

    def _differ(self, key: str, text: str) -> None:
        self.differences.append(_Difference(self._position, key, text))

    def _visit(self, pair: _Pair) -> None:
        key, a, b = pair.key, _state_of(pair.a), _state_of(pair.b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            self._visit_tensors(key, a, b)
        elif isinstance(a, Mapping) and isinstance(b, Mapping):
            self._visit_mappings(key, a, b)
        elif type(a) is not type(b):
            self._differ(key, f"{_described(a)} and {_described(b)}")
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                self._differ(key, f"{len(a)} and {len(b)} elements")
            else:
                self._wait_for([_Pair(_joined(key, n), *values) for n, values in enumerate(zip(a, b))])
        elif isinstance(a, (np.ndarray, np.generic)):
            self._visit_arrays(key, np.asarray(a), np.asarray(b))
        elif isinstance(a, (float, complex)):
            if bits_of(a) != bits_of(b):
                self._differ(key, two_values(a, b, bits_of(a), bits_of(b)))
        elif isinstance(a, (int, str, bytes, bytearray, set, frozenset, type)):
            if a != b:
                self._differ(key, f"{shown(a)} and {shown(b)}")
        else:
            self._visit_objects(key, a, b)

    def _wait_for(self, pairs: list[_Pair]) -> None:
        self._waiting += reversed(pairs)

    def _visit_tensors(self, key: str, a: torch.Tensor, b: torch.Tensor) -> None:
        differing = [
            f"{name} {x} and {y}"
            for name, x, y in (("shape", tuple(a.shape), tuple(b.shape)), ("dtype", a.dtype, b.dtype))
            if x != y
        ]
        if differing:
            self._differ(key, ", ".join(differing))
        elif a.is_meta != b.is_meta:
            self._differ(key, f"device {a.device} and {b.device}: a tensor on the meta device has no data")
        elif not a.is_meta:
            self.tensors[self._position] = _Pair(key, a, b)

    def _visit_mappings(self, key: str, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> None:
        # True, 1 and 1.0 are one key for Python, and three for a checkpoint.
        first, second = ({(_number_kind(slot), slot): value for slot, value in one.items()} for one in (a, b))
        for one, other, which in ((first, second, "first"), (second, first, "second")):
            for kind, slot in one:
                if (kind, slot) not in other:
                    self._differ(_joined(key, slot), f"only in the {which} state")
        self._wait_for([_Pair(_joined(key, slot[1]), first[slot], second[slot]) for slot in first if slot in second])

    def _visit_arrays(self, key: str, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
        if a.dtype != b.dtype or a.shape != b.shape:
            self._differ(key, f"{_described(a)} and {_described(b)}")
        elif a.dtype.hasobject:
            self._wait_for([_Pair(key, x, y) for x, y in zip(a.reshape(-1).tolist(), b.reshape(-1).tolist())])
        else:
            found = first_difference(rows_of_array(a), rows_of_array(b), a.shape)
            if found is not None:
                x, y = a[found.at], b[found.at]
                self._differ(key, element_text(found, a.size, two_values(x, y, x.tobytes(), y.tobytes())))

    def _visit_objects(self, key: str, a: Any, b: Any) -> None:
        try:
            parts = _pickled_parts(a), _pickled_parts(b)
        except Exception:  # the object cannot be pickled, so only its own comparison is left
            if a != b:
                self._differ(key, f"{shown(a)} and {shown(b)}")
            return
        (attributes, rest), (other_attributes, other_rest) = parts
        if attributes is not None or other_attributes is not None:
            self._wait_for([_Pair(key, attributes or {}, other_attributes or {}), _Pair(key, rest, other_rest)])
        elif _differences(*parts):
            self._differ(key, f"{shown(a)} and {shown(b)}")


class _Parts(NamedTuple):
    """The parts of an object that pickle saves.

    Args:
        attributes: the object's attributes by name; None if it has another kind of state.
        rest: all other parts.
    """

    attributes: dict[str, Any] | None
    rest: Any


def _pickled_parts(value: Any) -> _Parts:
    """Return what pickle saves of an object.

    Raises:
        Exception: the object cannot be pickled.
    """
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return _Parts(None, reduced)
    make, arguments, state, elements, items, *more = (*reduced, None, None, None)[: max(5, len(reduced))]
    rest = (make, arguments, list(elements or ()), list(items or ()), more)
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # attributes in slots
        state = {**(state[0] or {}), **state[1]}
    return _Parts(state, (*rest, None)) if isinstance(state, dict) else _Parts(None, (*rest, state))


def _tensor_differences(tensors: Mapping[int, _Pair]) -> Iterator[_Difference]:
    """Yield the tensors that differ; all pairs have the same shape and dtype."""
    names: dict[str, int] = {}  # the names that errors of ``lay_out`` use; elements of an array share their key
    for n, pair in tensors.items():
        names[f"{pair.key} ({n})" if pair.key in names else pair.key] = n
    handles_a = lay_out({name: tensors[n].a for name, n in names.items()}, access_of)
    handles_b = lay_out({name: tensors[n].b for name, n in names.items()}, access_of)
    for name, n in names.items():
        pair = tensors[n]
        text = tensor_difference(pair.key, handles_a[name], handles_b[name])
        if text is not None:
            yield _Difference(n, pair.key, text)


def _state_of(value: Any) -> Any:
    return value if isinstance(value, (torch.Tensor, type)) else _dcp.state_of(value)


def _number_kind(key: Any) -> type | None:
    """Return the kind of a number that is a mapping's key; None for other keys."""
    return next((kind for kind in (bool, int, float) if isinstance(key, kind)), None)


def _joined(key: str, element: Any) -> str:
    return f"{key}.{element}" if key else str(element)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return f"{type(value).__qualname__} {shown(value)}"

"""Dtypes, scalars and arrays of numpy, rebuilt from their description and their bytes.

numpy trusts the state that a pickle gives a dtype. Its flags, offsets and sizes can let an array reach into memory
outside of the array. So no state is passed to numpy. ``np.dtype`` makes a dtype from a description that numpy checks
itself. An array is made from exactly the bytes that its shape and dtype need. An array of objects is filled object by
object.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torch_xla_ckpt.serialization.table import CheckedFunction, Refused, UnfinishedObject
from torch_xla_ckpt.serialization.torch_values import LIMIT

_SPEC = re.compile(r"[?bBiufcgmMOSUV][0-9]{0,9}")
_UNIT = re.compile(r"generic|Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as")
_ALIGNED = 0x80
_NATIVE = "<" if sys.byteorder == "little" else ">"
_MAX_CHARACTER = 0x10FFFF
# Most elements of an array whose elements have no bytes, such as strings of length 0.
_MAX_EMPTY = 1 << 16
_MAX_PARTS = 10_000  # of a structured dtype


def _require(condition: bool) -> None:
    if not condition:
        raise Refused("its pickle describes a value as numpy never does")


def _shape(value: Any) -> tuple[int, ...]:
    _require(type(value) is tuple and all(type(n) is int and 0 <= n < LIMIT for n in value))
    return tuple(value)


def _new_dtype(spec: Any, *_: Any) -> UnfinishedObject:
    _require(type(spec) is str and _SPEC.fullmatch(spec) is not None)
    return UnfinishedObject(lambda state: _dtype(spec, state))


def _dtype(spec: str, state: Any) -> Any:
    _require(type(state) is tuple and len(state) in (8, 9) and state[0] in (3, 4))
    _, order, part, names, fields, size, _, flags, *more = state
    _require(type(flags) is int and order in ("<", ">", "=", "|"))
    if names is not None:
        made = _structured(names, fields, size, bool(flags & _ALIGNED))
    elif part is not None:
        base, shape = part
        _require(isinstance(base, np.dtype))
        made = np.dtype((base, (shape,) if type(shape) is int else _shape(shape)))
    elif spec[0] in "mM":
        _require(bool(more) and type(more[0]) is tuple and len(more[0]) == 2)
        made, more = np.dtype(f"{spec[0]}8[{_unit(more[0][1])}]"), [more[0][0]]
    else:
        made = np.dtype(spec)
    if names is None and part is None and order in "<>" and order != _NATIVE:
        made = made.newbyteorder(order)
    _require(size in (-1, made.itemsize) and made.char != "X" and _is_small(made))
    about = more[0] if more else None
    _require(about is None or type(about) is dict)
    return np.dtype(made, metadata=about) if about else made  # type: ignore[call-overload]


def _is_small(dtype: Any) -> bool:
    """Whether a dtype has few fields at all levels. Fields may overlap, so that a pickle can nest 2**100 of them."""
    waiting, parts = [dtype], 0
    while waiting and parts <= _MAX_PARTS:
        one = waiting.pop()
        parts += 1
        if one.subdtype is not None:
            base, shape = one.subdtype
            parts += 0 if base.itemsize else math.prod(shape)
            waiting.append(base)
        elif one.names is not None:
            waiting += [one.fields[name][0] for name in one.names]
    return parts <= _MAX_PARTS


def _unit(given: Any) -> str:
    unit, number, per, event = given
    unit = unit.decode("ascii") if type(unit) is bytes else unit
    _require(type(unit) is str and _UNIT.fullmatch(unit) is not None)
    _require(type(number) is int and 1 <= number < 1 << 31 and per == event == 1)
    return unit if number == 1 else f"{number}{unit}"


def _structured(names: Any, fields: Any, size: Any, aligned: bool) -> Any:
    _require(type(names) is tuple and type(fields) is dict and set(names) == set(fields) and type(size) is int)
    _require(all(type(name) is str and type(fields[name]) is tuple and len(fields[name]) == 2 for name in names))
    formats, offsets = [fields[name][0] for name in names], [fields[name][1] for name in names]
    _require(all(isinstance(one, np.dtype) for one in formats))
    _require(all(type(n) is int and 0 <= n <= size - one.itemsize for n, one in zip(offsets, formats)))
    layout: Any = {"names": list(names), "formats": formats, "offsets": offsets, "itemsize": size, "aligned": aligned}
    made = np.dtype(layout)
    if made.hasobject:  # the bytes of pointers must not overlap with other fields
        spans = sorted((n, n + one.itemsize) for n, one in zip(offsets, formats))
        _require(all(a[1] <= b[0] for a, b in itertools.pairwise(spans)))
    return made


def _new_array(cls: Any, *_: Any) -> UnfinishedObject:
    _require(cls is np.ndarray)
    return UnfinishedObject(_array)


def _array(state: Any) -> Any:
    _require(type(state) is tuple and len(state) == 5)
    _, shape, dtype, fortran, raw = state
    shape = _shape(shape)
    count = math.prod(shape)
    _require(isinstance(dtype, np.dtype) and type(fortran) is bool and dtype.subdtype is None)
    order: Any = "F" if fortran else "C"
    if dtype.hasobject:
        _require(type(raw) is list and len(raw) == count)
        flat = np.empty(count, dtype)
        for number, value in enumerate(raw):
            _require(dtype.names is None or type(value) is tuple)
            flat[number] = value
        return np.asarray(flat.reshape(shape), order=order)
    _require(type(raw) is bytes and len(raw) == count * dtype.itemsize and (dtype.itemsize > 0 or count < _MAX_EMPTY))
    return _plausible(np.ndarray(shape, dtype, raw, order=order).copy(order="K"))


def _scalar(dtype: Any, raw: Any) -> Any:
    _require(isinstance(dtype, np.dtype) and not dtype.hasobject and dtype.subdtype is None)
    _require(type(raw) is bytes and len(raw) == dtype.itemsize)
    return _plausible(np.ndarray((), dtype, raw).copy())[()]


def _plausible(array: Any) -> Any:
    """Return the array if its bytes are values of its dtype. Booleans become 0 or 1, because numpy relies on it.

    Raises:
        Refused: a character is no Unicode character.
    """
    if array.dtype.names is not None:
        for name in array.dtype.names:
            _plausible(array[name])
    elif array.dtype.kind == "b":
        np.not_equal(array.view(np.uint8), 0, out=array)
    elif array.dtype.kind == "U" and array.size and array.dtype.itemsize:
        characters = np.ascontiguousarray(array).reshape(-1).view(array.dtype.byteorder + "u4")
        _require(int(characters.max()) <= _MAX_CHARACTER)
    return array


_HELPERS: Mapping[str, Callable[..., Any]] = {"_reconstruct": _new_array, "scalar": _scalar}
VALUES: Mapping[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    # numpy 2 moved these functions to another module. Checkpoints of either version are read.
    **{
        f"numpy.{core}.multiarray.{name}": CheckedFunction(name, make)
        for name, make in _HELPERS.items()
        for core in ("core", "_core")
    },
    **{f"numpy.dtypes.{cls.__name__}": cls for cls in {type(np.dtype(code)) for code in np.typecodes["All"]}},
}
CALLS: Mapping[type, Callable[..., Any]] = {np.dtype: _new_dtype}

"""Values of Python's standard library. Each is made by a function that checks the arguments from the pickle.

Constructors accept more than honest pickles contain: ``bytearray(10**12)`` allocates, ``set(range(10**12))`` hangs, and
``datetime(b"...")`` trusts its bytes. So every call has its own check.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from torch_xla_ckpt.serialization.table import CheckedFunction, Refused, UnfinishedObject

_PATHS = (pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath, pathlib.WindowsPath)
_CLASSES = (
    *(bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple),
    *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, uuid.UUID, uuid.SafeUUID),
)


def require(condition: bool, value: str) -> None:
    """Refuse the pickle unless a condition holds.

    Args:
        condition: the condition.
        value: the kind of value that the pickle makes, for the error, such as "a date".
    """
    if not condition:
        raise Refused(f"its pickle does not make {value} as Python does")


def _items(value: Any) -> Any:
    require(type(value) in (list, tuple), "a container")
    return value


def _encoded(text: Any, encoding: Any) -> bytes:
    require(type(text) is str and encoding in ("latin1", "latin-1"), "bytes")
    return str(text).encode("latin1")


def _bytes(*given: Any) -> bytes:
    require(not given or given == (b"",), "bytes")
    return b""


def _bytearray(*given: Any) -> bytearray:
    if len(given) == 2:
        return bytearray(_encoded(*given))
    require(not given or (len(given) == 1 and type(given[0]) is bytes), "a bytearray")
    return bytearray(*given)


def _complex(real: Any, imaginary: Any) -> complex:
    require(type(real) is type(imaginary) is float, "a complex number")
    return complex(real, imaginary)


def _container(kind: type) -> Callable[..., Any]:
    return lambda items=(): kind(_items(items))


def _mapping(kind: type) -> Callable[..., Any]:
    def make(pairs: Any = ()) -> Any:
        return kind([(key, value) for key, value in map(_items, _items(pairs))])

    return make


def _counter(counts: Any = None) -> Any:
    require(counts is None or type(counts) is dict, "a Counter")
    return collections.Counter(counts)


def _defaultdict(*factory: Any) -> Any:
    require(len(factory) < 2, "a defaultdict")
    return collections.defaultdict(*factory)


def _deque(items: Any = (), maxlen: int | None = None) -> Any:
    return collections.deque(_items(items), maxlen)


def _date(state: Any) -> datetime.date:
    high, low, month, day = _octets(state, 4)
    return datetime.date(high << 8 | low, month, day)


def _time(state: Any, *zone: Any) -> datetime.time:
    hour, minute, second, *micro = _octets(state, 6)
    micros = int.from_bytes(bytes(micro), "big")
    return datetime.time(hour & 0x7F, minute, second, micros, *zone, fold=hour >> 7)


def _datetime(state: Any, *zone: Any) -> datetime.datetime:
    high, low, month, day, hour, minute, second, *micro = _octets(state, 10)
    micros = int.from_bytes(bytes(micro), "big")
    date = high << 8 | low, month & 0x7F, day
    return datetime.datetime(*date, hour, minute, second, micros, *zone, fold=month >> 7)


def _octets(state: Any, count: int) -> bytes:
    require(type(state) is bytes and len(state) == count, "a date or time")
    return bytes(state)


def _decimal(text: Any) -> decimal.Decimal:
    require(type(text) is str, "a Decimal")
    return decimal.Decimal(text)


def _numbers(kind: Callable[..., Any], least: int, most: int) -> Callable[..., Any]:
    def make(*given: Any) -> Any:
        require(least <= len(given) <= most and all(type(n) is int for n in given), "a value of numbers")
        return kind(*given)

    return make


def _slice(*given: Any) -> slice:
    require(len(given) == 3, "a slice")
    return slice(*given)


def _path(cls: type) -> Callable[..., Any]:
    def make(*parts: Any) -> Any:
        require(all(type(part) is str for part in parts), "a path")
        return cls(*parts)

    return make


def _safe_uuid(value: Any) -> uuid.SafeUUID:
    require(value is None or type(value) is int, "a UUID")
    return uuid.SafeUUID(value)


def _new_uuid() -> UnfinishedObject:
    def finish(state: Any) -> uuid.UUID:
        require(type(state) is dict and type(state.get("int")) is int, "a UUID")
        return uuid.UUID(int=state["int"], is_safe=_safe_uuid(state.get("is_safe")))

    return UnfinishedObject(finish)


def set_attributes(instance: Any, state: Any) -> None:
    """Set attributes of an instance that its class does not define.

    Raises:
        Refused: the state would replace an attribute of the class.
    """
    if type(state) is tuple and len(state) == 2 and not state[1]:
        state = state[0]
    if state is None:
        return
    if type(state) is not dict or not all(type(name) is str and not hasattr(type(instance), name) for name in state):
        raise Refused(f"its pickle replaces attributes of the class {type(instance).__name__}")
    vars(instance).update(state)


VALUES: Mapping[str, Any] = {
    **{f"{cls.__module__}.{cls.__qualname__}": cls for cls in _CLASSES},
    # Python 3.13 moved the path classes to another module. Checkpoints of either version are read.
    **{f"{module}.{cls.__name__}": cls for cls in _PATHS for module in ("pathlib", "pathlib._local")},
    "_codecs.encode": CheckedFunction("_codecs.encode", _encoded),
}
CALLS: Mapping[type, Callable[..., Any]] = {
    bytes: _bytes,
    bytearray: _bytearray,
    complex: _complex,
    set: _container(set),
    frozenset: _container(frozenset),
    list: _container(list),
    tuple: _container(tuple),
    dict: _mapping(dict),
    range: _numbers(range, 1, 3),
    slice: _slice,
    collections.Counter: _counter,
    collections.OrderedDict: _mapping(collections.OrderedDict),
    collections.defaultdict: _defaultdict,
    collections.deque: _deque,
    datetime.date: _date,
    datetime.time: _time,
    datetime.datetime: _datetime,
    datetime.timedelta: _numbers(datetime.timedelta, 0, 3),
    datetime.timezone: datetime.timezone,
    decimal.Decimal: _decimal,
    uuid.SafeUUID: _safe_uuid,
    **{cls: _path(cls) for cls in _PATHS},
}
NEWS: Mapping[type, Callable[..., Any]] = {uuid.UUID: _new_uuid}
STATES: Mapping[type, Callable[[Any, Any], None]] = {collections.OrderedDict: set_attributes}

"""Properties that are computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")


class lazy_property(Generic[_T]):
    """``functools.cached_property`` without a lock.

    Before Python 3.12, all instances share the lock of ``cached_property``. If another thread holds it during a fork,
    the child waits for the lock forever.
    """

    def __init__(self, compute: Callable[[Any], _T]):
        self._compute = compute
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> lazy_property[_T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> _T: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self._compute.__name__] = self._compute(instance)
        return value

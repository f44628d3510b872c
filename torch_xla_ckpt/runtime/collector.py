"""Keeping the garbage collector out of bulk work."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch_xla_ckpt.runtime import forks

_P = ParamSpec("_P")
_R = TypeVar("_R")

# A threshold that is never reached. It is no value a program would set, so that its own settings can be told from ours.
_PAUSED = (1 << 31) - 1

_lock = threading.Lock()
_pauses = 0
_before = 0  # the threshold of the program


@forks.in_child
def _go_on() -> None:
    """In a forked child, no function of the parent ends, so no pause would."""
    global _lock, _pauses
    _lock = threading.Lock()
    paused, _pauses = _pauses, 0
    if paused:
        _restore()


def _restore() -> None:
    """Give the program its threshold back, unless it has set one itself meanwhile."""
    if gc.get_threshold()[0] == _PAUSED:
        gc.set_threshold(_before)


def without_collector(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function with Python's cyclic garbage collector paused.

    Planning makes hundreds of thousands of objects, none of them garbage. Every quarter more of them makes the
    collector walk all objects of the program, which took more than half of the time of saving 20,000 small tensors. It
    goes on afterwards as before; functions of several threads may overlap.

    The pause is a threshold that is never reached. ``gc.disable`` would be undone by our ``gc.enable`` if the program
    calls it meanwhile for reasons of its own.
    """

    @functools.wraps(function)
    def paused(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        global _pauses, _before
        owner = forks.Owner()
        with _lock:
            _pauses += 1  # first, so that a child forked right here turns the collector on
            if _pauses == 1:
                _before = gc.get_threshold()[0]
                gc.set_threshold(_PAUSED)
        try:
            return function(*args, **kwargs)
        finally:
            with _lock:
                if owner.is_here:
                    if _pauses == 1:
                        _restore()
                    _pauses -= 1

    return paused

"""Pause Python's garbage collector while a checkpoint is planned, saved or loaded."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch_xla_ckpt.runtime import forks

_P = ParamSpec("_P")
_R = TypeVar("_R")

# A threshold that is never reached. No program would set this value, so a program's settings differ from ours.
_PAUSED = (1 << 31) - 1

_lock = threading.Lock()
_pauses = 0
_before = 0  # the program's threshold


@forks.in_child
def _end_pauses() -> None:
    """End all pauses in a forked child, where the functions that would end them do not run."""
    global _lock, _pauses
    _lock = threading.Lock()
    paused, _pauses = _pauses, 0
    if paused:
        _restore()


def _restore() -> None:
    """Restore the program's threshold, unless the program has set another one meanwhile."""
    if gc.get_threshold()[0] == _PAUSED:
        gc.set_threshold(_before)


def without_collector(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function while Python's cyclic garbage collector is paused; a decorator.

    Planning makes hundreds of thousands of objects, and none of them is garbage. Whenever their number has grown by a
    quarter, the collector walks all objects of the program. This took more than half of the time of saving 20,000 small
    tensors. Decorated functions may run in several threads at the same time. When the last one returns, the collector
    runs as before.

    The pause is a threshold that is never reached. ``gc.disable`` is not used: if the program called it during the
    pause, our ``gc.enable`` would undo that.
    """

    @functools.wraps(function)
    def paused(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        global _pauses, _before
        owner = forks.Owner()
        with _lock:
            _pauses += 1  # first, so that a child forked at this moment turns the collector on
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

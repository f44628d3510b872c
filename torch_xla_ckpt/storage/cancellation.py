"""Cancelling saves and loads while a store does not answer: waits for requests end at once.

A thread belongs to the cancellations of the blocks that it is in. Calls that it starts in other threads belong to them
too. A request that is given up goes on, as one that exceeds its time limit does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from torch_xla_ckpt.runtime import forks

_CLEAN_UP = 5.0  # seconds for the requests that remove what a cancelled save has written

# Each future resolves when its cancellation happens. A wait for an answer also waits for them.
_current: ContextVar[tuple[Future[None], ...]] = ContextVar("cancellations", default=())
_hurried: ContextVar[bool] = ContextVar("hurried", default=False)


class Cancellation:
    """Gives up the requests of some threads. It takes part in the cancellations of the thread that creates it."""

    def __init__(self) -> None:
        self._cancelled: Future[None] = Future()
        self._all = (*_current.get(), self._cancelled)

    @property
    def is_cancelled(self) -> bool:
        """Whether requests in the block ``applied`` are given up."""
        return any(one.done() for one in self._all)

    def cancel(self) -> None:
        """Give up all requests of threads in the block ``applied``, now and later."""
        with suppress(InvalidStateError):  # cancelled before
            self._cancelled.set_result(None)

    def join(self) -> None:
        """Let this thread belong to the cancellation until it ends."""
        _current.set(self._all)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let this thread belong to the cancellation in the block."""
        token = _current.set(self._all)
        try:
            yield
        finally:
            _current.reset(token)


def is_cancelled() -> bool:
    """Return whether the requests of this thread are given up."""
    return any(one.done() for one in _current.get())


def is_hurried() -> bool:
    """Return whether this thread cleans up after a cancel, and the user waits for its end."""
    return _hurried.get()


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is Ctrl-C, or another exception that ends the program."""
    return error is not None and not isinstance(error, Exception)


def wait_for_any(calls: Collection[Future[Any]], seconds: float | None) -> set[Future[Any]]:
    """Wait until a call ends, the thread's requests are given up, or the time is up. Return the calls that have ended.

    Args:
        calls: the futures of the calls.
        seconds: the longest time to wait; None for no limit.
    """
    ended = wait([*calls, *_current.get()], seconds, FIRST_COMPLETED).done
    return {call for call in calls if call in ended}


def pause(seconds: float) -> None:
    """Sleep until the time is up, or the thread's requests are given up."""
    if _current.get():
        wait_for_any((), seconds)
    else:
        time.sleep(seconds)


@contextmanager
def clean_up(*, hurried: bool = False) -> Iterator[None]:
    """Make requests in the block although earlier ones were given up. Then the block has a few seconds for them.

    Args:
        hurried: whether the user waits for the end of a cancelled save. Default: only if the thread's requests are
            given up.
    """
    if not hurried and not is_cancelled():
        yield
        return
    token, before = _current.set(()), _hurried.set(True)
    limit = Cancellation()
    timer = threading.Timer(_CLEAN_UP, limit.cancel)
    timer.daemon = True
    try:
        timer.start()
        with limit.applied():
            yield
    finally:
        timer.cancel()
        _hurried.reset(before)
        _current.reset(token)


@forks.in_child
def _forget() -> None:
    """Forget the parent's cancellations, whose locks another thread may have held during the fork."""
    _current.set(())

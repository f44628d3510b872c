"""Calls that get a time limit, whatever they wait for.

A store may never answer, and fsspec has no time limit that all of its backends keep. So a call runs in a thread of its
own, which is left behind when the time is up. Threads of calls that ended are used again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, ParamSpec, TypeVar

from torch_xla_ckpt.runtime import forks

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple[Future[Any], Callable[[], Any]]
_idle: list[queue.SimpleQueue[_Job]] = []  # one for each thread that waits for a call
_lock = threading.Lock()


class RequestTimeout(TimeoutError):
    """A call did not end within its time limit.

    Attributes:
        call: ends when the call does, which goes on.
    """

    def __init__(self, message: str, call: Future[Any] | None = None):
        super().__init__(message)
        self.call = call


class GivenUp:
    """Calls that were given up on and may still run, each under the name of what it works on.

    A store may carry out such a request at any time, and undo what was done there since.
    """

    def __init__(self) -> None:
        self._renew()
        forks.renew_in_child(self, GivenUp._renew)  # whose calls none of these are

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, list[tuple[str, Future[Any]]]] = {}

    def add(self, where: str, what: str, call: Future[Any]) -> None:
        with self._lock:
            self._calls.setdefault(where, []).append((what, call))

    def wait(self, where: str, seconds: float) -> list[str]:
        """Wait until none of a place runs any more; returns what those do that still run after some seconds."""
        with self._lock:
            calls = tuple(self._calls.get(where, ()))
        if not calls:
            return []
        running = wait([call for _, call in calls], seconds).not_done
        with self._lock:
            left = [(what, call) for what, call in self._calls.pop(where, ()) if not call.done()]
            if left:
                self._calls[where] = left
        return [what for what, call in calls if call in running]


def call_within(seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function and wait for its result.

    Args:
        seconds: how long to wait. The call itself goes on after that, and nobody learns of its result.

    Raises:
        RequestTimeout: the call takes longer.
    """
    with _lock:
        jobs = _idle.pop() if _idle else None
    if jobs is None:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), name="torch_xla_ckpt-request", daemon=True).start()
    result: Future[T] = Future()
    jobs.put((result, lambda: function(*args, **kwargs)))
    try:
        return result.result(seconds)
    except FutureTimeout:
        if result.done():  # the function itself raised it
            raise
        raise RequestTimeout(f"no answer within {seconds:.0f} s", result) from None


def _work(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        result, call = jobs.get()
        try:
            value = call()
        except BaseException as error:
            _make_idle(jobs)
            result.set_exception(error)
        else:
            _make_idle(jobs)
            result.set_result(value)
        del result, call  # a thread that waits must not hold the last call's data
        value = None


def _make_idle(jobs: queue.SimpleQueue[_Job]) -> None:
    with _lock:
        _idle.append(jobs)


@forks.in_child
def _forget_threads() -> None:
    """A forked child has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()

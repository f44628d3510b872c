"""Calls that get a time limit, whatever they wait for.

A store may never answer, and fsspec has no time limit that all of its backends keep. So a call runs in a thread of its
own, which is left behind when the time is up. Threads of calls that ended are used again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, ParamSpec, TypeVar

from torch_xla_ckpt import forks

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple[Future[Any], Callable[[], Any]]
_idle: list[queue.SimpleQueue[_Job]] = []  # one for each thread that waits for a call
_lock = threading.Lock()


class RequestTimeout(TimeoutError):
    """A call did not end within its time limit."""


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
        raise RequestTimeout(f"no answer within {seconds:.0f} s") from None


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

"""Calls with a time limit, and calls at the same time.

A store may never answer, and no time limit of fsspec holds for all of its backends. So each call runs in a thread. When
the time is up, the caller goes on without the thread. Threads of calls that have ended are used again.
"""

from __future__ import annotations

import contextvars
import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.cancellation import Cancellation, is_cancelled, wait_for_any

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple[Future[Any], Callable[[], Any]]
_idle: list[queue.SimpleQueue[_Job]] = []  # one for each thread that waits for a call
_numbers = itertools.count()  # of the threads, so that a timeline tells them apart
_lock = threading.Lock()


class RequestTimeout(TimeoutError):
    """A call did not end within its time limit.

    Attributes:
        call: the future of the call, which is still running.
        doing: what the call does; "" if unknown.
    """

    def __init__(self, message: str, call: Future[Any] | None = None, doing: str = ""):
        super().__init__(message)
        self.call = call
        self.doing = doing

    def __reduce__(self) -> Any:  # ranks send errors to each other, and a call cannot be sent
        return type(self), (str(self), None, self.doing)


class GivenUp(RequestTimeout):
    """A call was given up, because its save or load was cancelled or has failed. ``call`` is None if it never began."""

    def __init__(self, message: str = "", call: Future[Any] | None = None, doing: str = ""):
        super().__init__(message or "the call was given up: its save or load was cancelled or has failed", call, doing)


class _Left:
    """The call that an interrupt has left running. It is left out if the interrupt is sent to another rank."""

    def __init__(self, call: Future[Any] | None = None):
        self.call = call

    def __reduce__(self) -> Any:
        return _Left, ()


def interrupted_call(error: BaseException) -> Future[Any] | None:
    """Return the future of the call that an exception has left running; None if there is none."""
    if isinstance(error, RequestTimeout):
        return error.call
    left = getattr(error, "left_running", None)
    return left.call if isinstance(left, _Left) else None


class AbandonedCalls:
    """Calls whose answers nobody waits for any more and that may still be running, by folder.

    A store may carry out such a request at any time, and undo what was done there since.
    """

    def __init__(self) -> None:
        self._renew()
        forks.renew_in_child(self, AbandonedCalls._renew)  # the calls run in the parent only

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, list[tuple[str, Future[Any]]]] = {}

    def add(self, folder: str, name: str, call: Future[Any]) -> None:
        """Add a call.

        Args:
            folder: the identity of the folder that the call works on.
            name: a description of the call, for people.
            call: the future of the call.
        """
        with self._lock:
            left = [(other, known) for other, known in self._calls.get(folder, ()) if not known.done()]
            self._calls[folder] = [*left, (name, call)]

    def wait(self, folder: str, seconds: float, names: Collection[str] | None = None) -> list[str]:
        """Wait until no call on a folder runs any more, and return the names of calls that still run.

        Args:
            folder: the identity of the folder.
            seconds: the longest time to wait.
            names: the names of the calls to wait for. Default: all calls.

        Raises:
            GivenUp: the requests of this thread are given up.
        """
        with self._lock:
            calls = [(name, call) for name, call in self._calls.get(folder, ()) if names is None or name in names]
        if not calls:
            return []
        running = {call for _, call in calls if not call.done()}
        until = time.monotonic() + seconds
        while running and (left := until - time.monotonic()) > 0:
            running -= wait_for_any(running, left)
            if is_cancelled():
                raise GivenUp
        with self._lock:
            rest = [(name, call) for name, call in self._calls.pop(folder, ()) if not call.done()]
            if rest:
                self._calls[folder] = rest
        return [name for name, call in calls if call in running]


def call_within(seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function and wait for its result.

    Args:
        seconds: the time limit. A call that takes longer goes on, and its result is lost.
        function: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        RequestTimeout: the call takes longer.
        GivenUp: the requests of this thread are given up.
    """
    if is_cancelled():
        raise GivenUp
    result = start(lambda: function(*args, **kwargs))
    try:
        ended = wait_for_any([result], seconds)
    except BaseException as interrupt:
        interrupt.left_running = _Left(result)  # type: ignore[attr-defined]
        raise
    if ended:
        return result.result()
    if is_cancelled():
        raise GivenUp(call=result)
    raise RequestTimeout(f"no answer within {seconds:.0f} s", result)


def start(function: Callable[[], T]) -> Future[T]:
    """Call a function in another thread, and return the future of its result.

    The other thread belongs to the caller's cancellations during the call.
    """
    context = contextvars.copy_context()
    with _lock:
        jobs = _idle.pop() if _idle else None
    if jobs is None:
        jobs = queue.SimpleQueue()
        name = f"torch_xla_ckpt-request-{next(_numbers)}"
        threading.Thread(target=_work, args=(jobs,), name=name, daemon=True).start()
    result: Future[T] = Future()
    jobs.put((result, lambda: context.run(function)))
    return result


def together(functions: Sequence[Callable[[], object]], most: int = 32) -> None:
    """Call functions at the same time, and return when all of them have ended.

    Args:
        functions: the functions.
        most: the most functions to call at the same time. Default: 32.

    Raises:
        BaseException: what the first of the functions that failed has raised, in the order of ``functions``. After a
            failure, no further function is called, and the requests of the others are given up.
    """
    errors: dict[int, BaseException] = {}
    failing = Cancellation()
    left = iter(enumerate(functions))
    taking = threading.Lock()

    def work() -> None:
        while not errors:
            with taking:
                number, function = next(left, (-1, None))
            if function is None:
                return
            try:
                function()
            except BaseException as error:
                if not (errors and isinstance(error, GivenUp)):  # else it is the consequence of another error
                    errors[number] = error
                failing.cancel()

    try:
        with failing.applied():
            others = [start(work) for _ in range(min(len(functions), most) - 1)]
            work()
        wait(others)
    except BaseException as interrupt:
        errors[-1] = interrupt
        failing.cancel()
        raise
    if errors:
        raise errors[min(errors)]


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
        del result, call  # a waiting thread must not keep the data of its last call alive
        value = None


def _make_idle(jobs: queue.SimpleQueue[_Job]) -> None:
    with _lock:
        _idle.append(jobs)


@forks.in_child
def _forget_threads() -> None:
    """Forget the parent's threads, which do not exist in a forked child."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()

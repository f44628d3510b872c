"""Requests to a remote store through fsspec: time limits, repetition, and requests that may be carried out late.

Requests are counted. Those that can be made twice without harm are repeated after errors (``retries``), and made a
second time if the answer is late (``stragglers``).

Every name is taken literally. No function of fsspec that expands patterns is called (``rm``, ``expand_path``,
``glob``).
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import fsspec

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Bytes
from torch_xla_ckpt.reports import RequestCounts
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.cancellation import is_cancelled, is_hurried, pause, wait_for_any
from torch_xla_ckpt.storage.deadline import (
    AbandonedCalls,
    GivenUp,
    RequestTimeout,
    call_within,
    interrupted_call,
    start,
)
from torch_xla_ckpt.storage.file_errors import impossible_name
from torch_xla_ckpt.storage.location import Location
from torch_xla_ckpt.storage.request_errors import gave_up, refused
from torch_xla_ckpt.storage.retries import attempts_for, is_throttling, pauses
from torch_xla_ckpt.storage.stragglers import Stragglers

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Azure's client takes a view for an iterable of parts.
_ONLY_BYTES = frozenset(("abfs", "abfss", "adl", "az"))
_RANGES_AT_ONCE = 32  # ranges of one folder that are read at the same time
_LATE_PUTS = 10.0  # seconds to wait for puts that may be carried out late, before files are removed
_LAST_PUTS = 0.5  # the same seconds after a cancel

# Requests without a condition that put or remove ``.metadata``.
_abandoned = AbandonedCalls()
# Puts that were given up.
_late = AbandonedCalls()
# Puts whose second put was answered first.
_overtaken = AbandonedCalls()


class ByteRange(NamedTuple):
    """Bytes of a file, from ``start`` up to ``stop``."""

    name: str
    start: int
    stop: int


class Requests:
    """Requests to one remote folder.

    Args:
        location: the folder.

    Attributes:
        url: the folder's URL.
        fs: fsspec's filesystem.
        path: the folder's path in the filesystem.
    """

    def __init__(self, location: Location):
        assert location.filesystem is not None
        self.url = location.url
        self.fs: fsspec.AbstractFileSystem = location.filesystem
        self.path = location.path
        self._location = location
        self._writes, self._reads = Stragglers(), Stragglers()
        self._counts: Counter[str] = Counter()
        self._sent = self._received = self._repeated = self._asked_twice = 0
        self._renew()
        forks.renew_in_child(self, Requests._renew)

    def _renew(self) -> None:
        self._counting = threading.Lock()
        self._ranges = threading.BoundedSemaphore(_RANGES_AT_ONCE)

    def counts(self) -> RequestCounts:
        """Return the requests so far."""
        with self._counting:
            by_kind = dict(self._counts)
            return RequestCounts(by_kind, self._sent, self._received, self._repeated, self._asked_twice)

    def call(self, doing: str, nbytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of the filesystem once, with a time limit.

        Args:
            doing: what the request does, for the error: "write .metadata", for example.
            nbytes: the bytes that the request moves; each MiB adds a second to the time limit.
            function: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Raises:
            RequestTimeout: the store did not answer in time. The error names the folder and the request.
        """
        self.count(doing, nbytes)
        return self.within(doing, nbytes, function, *args, **kwargs)

    def within(self, doing: str, nbytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same as ``call``, and do not count the call as a request."""
        try:
            return call_within(self._limit(nbytes), function, *args, **kwargs)
        except GivenUp as error:
            raise self._given_up(doing, *([] if error.call is None else [error.call])) from None
        except RequestTimeout as error:
            raise self._timeout(doing, f"{error}", error.call) from None
        except PermissionError as error:
            raise refused(self.url, doing, error) from error

    def repeat(
        self,
        doing: str,
        nbytes: int,
        function: Callable[[], T],
        *,
        stragglers: Stragglers | None = None,
        is_hopeless: Callable[[Exception], bool] = lambda error: False,
    ) -> T:
        """Call a function of the filesystem that may be called twice without harm, again and again if it fails.

        Args:
            doing: what the request does, for the error.
            nbytes: the bytes that the request moves.
            function: the function.
            stragglers: the times of such requests, to make the request a second time if the answer is late. Default:
                it is never made a second time before it has failed.
            is_hopeless: returns whether not to repeat the request after an error. Default: the kind of the error
                decides.

        Raises:
            RequestTimeout: the store did not answer in time.
            OSError: the request failed again and again. The last answer is the cause.
            PermissionError: the store refused the request.
            Exception: an error that repetition cannot change, as the filesystem raised it.
        """
        began = time.monotonic()
        for attempt, seconds in enumerate(pauses(), 1):
            try:
                return self._race(doing, nbytes, function, stragglers)
            except Exception as error:
                most = attempts_for(error)
                if isinstance(error, PermissionError):
                    raise refused(self.url, doing, error) from error
                if most == 1 or is_hopeless(error):
                    raise
                if attempt >= most:
                    raise gave_up(self.url, doing, attempt, time.monotonic() - began, error) from error
                logger.info("%s: the request to %s failed, and is repeated: %s", self.url, doing, error)
            with self._counting:
                self._repeated += 1
            pause(seconds)
        raise AssertionError("the last attempt returns or raises")

    @property
    def takes_only_bytes(self) -> bool:
        """Whether the backend is known to refuse or to misread views of memory in the place of bytes."""
        named = self.fs.protocol
        protocols = {named} if isinstance(named, str) else set(named)
        return hasattr(self.fs, "call_s3") or bool(protocols & _ONLY_BYTES)

    def put(self, name: str, data: Bytes, *, is_new: bool = False) -> None:
        """Put a file.

        Args:
            name: the file's name.
            data: its bytes.
            is_new: True if no other bytes are ever put under this name. Then a late second put does no harm, and the
                request is made a second time if the answer is late. Default: False.
        """
        path = self.full_path(name)

        def put() -> None:
            try:
                self.fs.pipe_file(path, data)
            except (TypeError, AttributeError):
                if isinstance(data, bytes):
                    raise
                self.fs.pipe_file(path, bytes(data))  # a backend that takes no views of memory

        self.repeat(f"write {name}", len(data), put, stragglers=self._writes if is_new else None)

    def _race(self, doing: str, nbytes: int, function: Callable[[], T], stragglers: Stragglers | None) -> T:
        """Call a function. If the answer is late, call it a second time, and return the first answer."""
        if stragglers is None:
            return self.call(doing, nbytes, function)
        limit, began = self._limit(nbytes), time.monotonic()
        ask_again = stragglers.patience(nbytes)
        if is_cancelled():
            raise self._given_up(doing)
        self.count(doing, nbytes)
        running: list[Future[T]] = [start(function)]
        while True:
            elapsed = time.monotonic() - began
            for call in wait_for_any(running, max(0.0, min(limit, ask_again) - elapsed)):
                running.remove(call)
                error = call.exception()
                if error is None:
                    stragglers.answered(nbytes, time.monotonic() - began)
                    if stragglers is self._writes:
                        for late in running:
                            _overtaken.add(self._location.identity, doing, late)
                    return call.result()
                if not running:
                    raise error
            if is_cancelled():
                raise self._given_up(doing, *running)
            elapsed = time.monotonic() - began
            if elapsed >= limit:
                raise self._timeout(doing, f"no answer within {limit:.0f} s", running[0])
            if elapsed >= ask_again:
                logger.info("%s: no answer to the request to %s for %.1f s; it is made again", self.url, doing, elapsed)
                stragglers.ask_twice()
                self.count(doing, nbytes, is_second=True)
                running.append(start(function))
                ask_again = math.inf

    def _limit(self, nbytes: int) -> float:
        """Return the time limit of a request in seconds."""
        return self._location.request_timeout + nbytes / (1 << 20)

    def _timeout(self, doing: str, what: str, call: Future[Any] | None) -> RequestTimeout:
        return RequestTimeout(
            f"{self.url}: the request to {doing} got {what}. Check the network and the store; raise request_timeout= "
            "if the store is only slow",
            call,
            doing,
        )

    def _given_up(self, doing: str, *calls: Future[Any]) -> GivenUp:
        for call in calls:
            if doing.startswith("write "):
                _late.add(self._location.identity, doing, call)
        return GivenUp(
            f"{self.url}: the request to {doing} was given up, because the save or load was cancelled or has failed",
            next(iter(calls), None),
            doing,
        )

    def count(self, doing: str, nbytes: int, *, is_second: bool = False) -> None:
        """Count a request."""
        kind = "look at" if doing.startswith("look at") else doing.partition(" ")[0]
        with self._counting:
            self._counts[kind] += 1
            self._asked_twice += is_second
            if kind == "write":
                self._sent += nbytes

    @contextmanager
    def remembered(self, doing: str, *, if_late: bool = True) -> Iterator[None]:
        """Remember requests in the block that are given up, so that ``settle`` waits for them.

        Args:
            doing: what the requests do, for the error of ``settle``.
            if_late: False to remember nothing. Default: True.
        """
        try:
            yield
        except BaseException as error:
            call = interrupted_call(error)
            if if_late and call is not None:
                _abandoned.add(self._location.identity, doing, call)
            raise

    def settle(self) -> None:
        """Wait for remembered requests of this process to this folder.

        Raises:
            CheckpointError: a request still runs after the time limit of one request.
        """
        limit = self._location.request_timeout
        running = _abandoned.wait(self._location.identity, limit)
        if running:
            raise CheckpointError(
                f"nothing was saved to {self.url}: an earlier request of this program to {running[0]} got no answer, "
                f"and still runs after another {limit:.0f} s. If the store carries it out later, it destroys what was "
                "saved there in the meantime. Check the network and the store, and save again when the request has "
                "ended; or save to another path"
            )

    def has_late_puts(self) -> bool:
        """Return whether the store may still carry out a put of this process that was given up."""
        return bool(_late.wait(self._location.identity, 0))

    def wait_for_late_puts(self, names: Collection[str]) -> None:
        """Wait for puts of files that were overtaken or given up. After a removal, they would bring the files back.

        After a few seconds, or a moment if the user waits for the end of a cancelled save, go on without them.
        """
        seconds, puts = _LAST_PUTS if is_hurried() else _LATE_PUTS, {f"write {name}" for name in names}
        for calls in (_overtaken, _late):
            calls.wait(self._location.identity, seconds, puts)

    def full_path(self, name: str) -> str:
        """Return the path of a file in the filesystem.

        Raises:
            FileNotFoundError: no file can have this name.
        """
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise impossible_name(name) from error
        return f"{self.path}/{name}"

    def forget_listing(self) -> None:
        """Drop fsspec's cached listing, which lacks the files that other processes have written since."""
        self.fs.invalidate_cache(self.path)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return int(self._info(name)["size"])

    def kind(self, name: str) -> str:
        """Return fsspec's type of an entry: "file" or "directory"."""
        return str(self._info(name)["type"])

    def _info(self, name: str) -> dict[str, Any]:
        self.forget_listing()
        path = self.full_path(name)
        return self.repeat(f"look at {name}", 0, lambda: self.fs.info(path))

    def read_range(self, wanted: ByteRange) -> bytes:
        """Return the bytes of a range, fewer where the file ends before.

        Raises:
            FileNotFoundError: there is no such file; ``filename`` is its name.
        """
        name, first, stop = wanted
        path = self.full_path(name)

        def read() -> bytes:
            (answer,) = self.fs.cat_ranges([path], [first], [stop], on_error="return")
            if isinstance(answer, BaseException):
                raise answer
            return bytes(answer)

        is_behind_end = False

        def is_hopeless(error: Exception) -> bool:
            # Object stores answer with an error if a range begins behind the end.
            nonlocal is_behind_end
            if is_throttling(error):
                return False
            try:
                is_behind_end = int(self.call(f"look at {name}", 0, self.fs.info, path)["size"]) <= first
            except FileNotFoundError:
                raise
            except Exception:  # the error of the read says more
                return False
            return is_behind_end

        with self._ranges:
            try:
                data = self.repeat(f"read {name}", stop - first, read, stragglers=self._reads, is_hopeless=is_hopeless)
            except FileNotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, "no such file", name) from error
            except Exception:
                if not is_behind_end:
                    raise
                data = b""
        with self._counting:
            self._received += len(data)
        return data

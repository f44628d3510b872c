"""Requests to a remote store through fsspec: time limits, repetition, and requests that may be carried out late.

Every name is taken literally. No function of fsspec that expands patterns is called (``rm``, ``expand_path``,
``glob``).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import fsspec

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.storage.deadline import AbandonedCalls, RequestTimeout, call_within
from torch_xla_ckpt.storage.file_errors import impossible_name
from torch_xla_ckpt.storage.location import Location

P = ParamSpec("P")
T = TypeVar("T")

ATTEMPTS = 3
"""How often a failed read is attempted, in addition to what the fsspec backend repeats by itself."""

# Requests without a condition that put or remove ``.metadata``.
_abandoned = AbandonedCalls()


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

    def call(self, doing: str, nbytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of the filesystem, with a time limit.

        Args:
            doing: what the request does, for the error: "write .metadata", for example.
            nbytes: the bytes that the request moves; each MiB adds a second to the time limit.
            function: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Raises:
            RequestTimeout: the store did not answer in time. The error names the folder and the request.
        """
        try:
            return call_within(self._location.request_timeout + nbytes / (1 << 20), function, *args, **kwargs)
        except RequestTimeout as error:
            raise RequestTimeout(
                f"{self.url}: the request to {doing} got {error}. Check the network and the store; raise "
                "request_timeout= if the store is only slow",
                error.call,
            ) from None

    @contextmanager
    def remembered(self, doing: str) -> Iterator[None]:
        """Remember requests in the block that exceed their time limit, so that ``settle`` waits for them."""
        try:
            yield
        except RequestTimeout as error:
            if error.call is not None:
                _abandoned.add(self._location.identity, doing, error.call)
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
        return self.call(f"look at {name}", 0, self.fs.info, self.full_path(name))

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, shorter where the file ends before. Failed reads are repeated."""
        self.forget_listing()
        answers: dict[int, bytes] = {}
        for attempt in range(1, ATTEMPTS + 1):
            asked = [number for number in range(len(ranges)) if number not in answers]
            if not asked:
                break
            for number, answer in zip(asked, self._ask([ranges[number] for number in asked])):
                name, start, _ = ranges[number]
                if isinstance(answer, FileNotFoundError):
                    raise FileNotFoundError(errno.ENOENT, "no such file", name)
                if not isinstance(answer, BaseException):
                    answers[number] = answer
                elif not isinstance(answer, Exception):
                    raise answer
                elif self.size(name) <= start:  # object stores answer with an error if a range begins behind the end
                    answers[number] = b""
                elif attempt == ATTEMPTS:
                    raise answer
        return [answers[number] for number in range(len(ranges))]

    def _ask(self, ranges: Sequence[ByteRange]) -> list[Any]:
        """Request all ranges at the same time; return bytes or an exception for each."""
        return self.call(  # type: ignore[no-any-return]
            f"read {ranges[0].name}",
            sum(stop - start for _, start, stop in ranges),
            self.fs.cat_ranges,
            [self.full_path(name) for name, _, _ in ranges],
            [start for _, start, _ in ranges],
            [stop for _, _, stop in ranges],
            on_error="return",
        )

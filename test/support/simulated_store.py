"""An object store in memory behind fsspec, with the times of a network: latency, streams, and a link that they share.

    with Store(latency=0.04, stream=100 * MIB, link=1024 * MIB) as store:
        xc.save(state, store.url("run/step-1"), storage_options=store.options)

Requests wait on fsspec's event loop, so a thousand of them cost as little as one. Each takes the latency, and then as
long as its bytes take. A stream has at most its own rate, and all active streams share the link fairly. The store
copies what it is sent, as a network does, into memory that it uses again: fresh memory can cost more than a whole save.

Tests let requests fail with ``failing``. The benchmark ``scripts/benchmarks/link`` uses the same store.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fnmatch
import io
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import fsspec
import numpy as np
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractBufferedFile

MIB = 1 << 20
PROTOCOL = "simulated"

_stores: dict[str, Store] = {}
_spare: dict[int, list[Buffer]] = {}  # memory of removed objects, by size
_numbers = itertools.count()


@dataclass(frozen=True)
class Request:
    """One request to the store.

    Args:
        operation: "put", "get", "list", "look", "copy", "remove", or "begin", "part" and "complete" of an upload in
            parts.
        path: the object's path, or the folder's.
        start, stop: the bytes that are sent or read.
        began: when the request began, in seconds of ``time.monotonic``.
    """

    operation: str
    path: str
    start: int = 0
    stop: int = 0
    began: float = 0.0

    @property
    def name(self) -> str:
        """The name of the object in its folder."""
        return self.path.rpartition("/")[2]

    @property
    def nbytes(self) -> int:
        """The bytes that the request moves."""
        return self.stop - self.start


When = Callable[[Request], bool]
Buffer = np.ndarray[Any, np.dtype[np.uint8]]


def asks(operation: str, name: str = "*") -> When:
    """Return a function that is true for such operations on objects whose names match a pattern."""
    return lambda request: request.operation == operation and fnmatch.fnmatchcase(request.name, name)


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a request.

    Args:
        before: an error instead of an answer, and the request is not carried out.
        after: an error instead of an answer, although the request is carried out.
        rate: the rate of the stream in bytes a second; None for the rate of the store.
        until: the request waits for this event before it is carried out; None if it does not wait.
    """

    before: Callable[[], Exception] | None = None
    after: Callable[[], Exception] | None = None
    rate: float | None = None
    until: threading.Event | None = None


class SlowDown(OSError):
    """The store's answer 503."""

    status = 503


SLOW_DOWN = Fault(before=lambda: SlowDown(errno.EBUSY, "503 Slow Down: please reduce your request rate"))
REFUSED = Fault(before=lambda: PermissionError(errno.EACCES, "403 Forbidden: the bucket is closed today"))
BROKEN_BEFORE = Fault(before=lambda: ConnectionResetError(errno.ECONNRESET, "the connection broke"))
BROKEN_AFTER = Fault(after=lambda: ConnectionResetError(errno.ECONNRESET, "the connection broke"))


@dataclass
class _Rule:
    fault: Fault
    when: When
    times: int | None
    met: list[Request] = field(default_factory=list)

    def takes(self, request: Request) -> bool:
        return (self.times is None or len(self.met) < self.times) and self.when(request)


@dataclass(eq=False)
class _Transfer:
    left: float
    most: float  # rate of the stream, in bytes a second
    done: asyncio.Future[None]
    rate: float = 0.0


class _Link:
    """A link whose rate all active transfers share fairly. Used on one event loop only.

    Args:
        rate: bytes a second.
    """

    def __init__(self, rate: float):
        self._rate = rate
        self._active: list[_Transfer] = []
        self._moved = 0.0  # the time up to which ``left`` of each transfer is right
        self._timer: asyncio.TimerHandle | None = None

    async def move(self, nbytes: int, rate: float) -> None:
        """Return when the bytes have crossed the link."""
        if not nbytes or math.isinf(min(rate, self._rate)):
            return
        transfer = _Transfer(nbytes, rate, asyncio.get_running_loop().create_future())
        self._advance()
        self._active.append(transfer)
        self._plan()
        try:
            await transfer.done
        finally:
            if transfer in self._active:  # the request was cancelled
                self._advance()
                self._active.remove(transfer)
                self._plan()

    def _advance(self) -> None:
        now = time.monotonic()
        for transfer in self._active:
            transfer.left -= transfer.rate * (now - self._moved)
        self._moved = now

    def _plan(self) -> None:
        """Give each transfer its fair share, and set the timer to the first that ends."""
        left = self._rate
        waiting = sorted(self._active, key=lambda transfer: transfer.most)
        for number, transfer in enumerate(waiting):
            transfer.rate = min(transfer.most, left / (len(waiting) - number))
            left -= transfer.rate
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._active:
            first = min(t.left / t.rate if t.rate else math.inf for t in self._active)
            self._timer = asyncio.get_running_loop().call_later(max(first, 0.0), self._end_some)

    def _end_some(self) -> None:
        self._advance()
        ended = [transfer for transfer in self._active if transfer.left <= 1.0]  # less than a byte is rounding
        self._active = [transfer for transfer in self._active if transfer.left > 1.0]
        for transfer in ended:
            if not transfer.done.done():
                transfer.done.set_result(None)
        self._plan()


class Store:
    """A store; a context manager.

    Args:
        latency: seconds from a request to its first byte. Default: 0.
        stream: bytes a second of one request. Default: no limit.
        link: bytes a second of all requests together. Default: no limit.

    Attributes:
        objects: the bytes of each object, by path. They are never changed in place.
        options: ``storage_options`` that lead to this store.
    """

    def __init__(self, latency: float = 0.0, stream: float = math.inf, link: float = math.inf):
        self.latency = latency
        self.stream = stream
        self.link = _Link(link)
        self.objects: dict[str, Buffer] = {}
        self.modified: dict[str, float] = {}
        self._name = f"store-{next(_numbers)}"
        self.options = {"store": self._name}
        self._shares = False
        self._rules: list[_Rule] = []
        self._logs: list[list[Request]] = []

    def __enter__(self) -> Store:
        fsspec.register_implementation(PROTOCOL, SimulatedFileSystem, clobber=True)
        _stores[self._name] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _stores[self._name]
        if self._shares:
            return
        for data in self.objects.values():
            _keep(data)

    def url(self, path: str) -> str:
        """Return the URL of a path in the store."""
        return f"{PROTOCOL}://bucket/{path}"

    def __getitem__(self, path: str) -> bytes:
        """Return the bytes of an object, given its path without the bucket."""
        return self.objects[f"bucket/{path}"].tobytes()

    def __setitem__(self, path: str, data: bytes) -> None:
        self.put(f"bucket/{path}", data)

    def share(self, other: Store) -> None:
        """Have the same objects as another store."""
        self.objects, self.modified, self._shares = dict(other.objects), dict(other.modified), True

    def clear(self) -> None:
        """Remove all objects."""
        for path in list(self.objects):
            self.drop(path)

    def drop(self, path: str) -> bool:
        """Remove an object at once. Return whether there was one."""
        data = self.objects.pop(path, None)
        if data is not None and not self._shares:
            _keep(data)
        return data is not None

    def names(self, path: str) -> list[str]:
        """Return the names of the objects in a folder."""
        folder = f"bucket/{path}/"
        return sorted(key.removeprefix(folder) for key in self.objects if key.startswith(folder))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Request]]:
        """Record the requests that are made in the block."""
        log: list[Request] = []
        self._logs.append(log)
        try:
            yield log
        finally:
            self._logs.remove(log)

    @contextlib.contextmanager
    def failing(self, fault: Fault, when: When, times: int | None = None) -> Iterator[list[Request]]:
        """Let requests fail: the first ``times`` of them, or all. Yields those that have failed."""
        rule = _Rule(fault, when, times)
        self._rules.append(rule)
        try:
            yield rule.met
        finally:
            self._rules.remove(rule)
            if fault.until is not None:
                fault.until.set()

    async def request(self, operation: str, path: str, start: int = 0, stop: int = 0) -> Fault:
        """Wait as long as a request takes. Raises the error of a fault that comes before the request."""
        request = Request(operation, path, start, stop, time.monotonic())
        for log in self._logs:
            log.append(request)
        rule = next((rule for rule in self._rules if rule.takes(request)), None)
        if rule is not None:
            rule.met.append(request)
        fault = Fault() if rule is None else rule.fault
        if self.latency:
            await asyncio.sleep(self.latency)
        while fault.until is not None and not fault.until.is_set():
            await asyncio.sleep(0.01)
        if fault.before is not None:
            raise fault.before()
        await self.link.move(request.nbytes, self.stream if fault.rate is None else fault.rate)
        return fault

    def put(self, path: str, data: bytes) -> None:
        """Put an object at once."""
        spare = _spare.get(len(data))
        buffer = spare.pop() if spare else np.empty(len(data), dtype=np.uint8)
        np.copyto(buffer, np.frombuffer(data, dtype=np.uint8))
        self.drop(path)
        self.objects[path] = buffer
        self.modified[path] = time.time()


def count(requests: list[Request]) -> Counter[str]:
    """Return the number of requests of each operation."""
    return Counter(request.operation for request in requests)


def _keep(data: Buffer) -> None:
    _spare.setdefault(len(data), []).append(data)


def _answered(fault: Fault) -> None:
    if fault.after is not None:
        raise fault.after()


class SimulatedFileSystem(AsyncFileSystem):
    """The filesystem. Its puts are atomic, and it has no folders, as in an object store."""

    protocol = PROTOCOL

    def __init__(self, store: str, **options: Any):
        super().__init__(**options)
        self._store_name = store

    @property
    def store(self) -> Store:
        return _stores[self._store_name]

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)
        fault = await self.store.request("put", path, 0, len(value))
        if mode == "create" and path in self.store.objects:
            raise FileExistsError(path)
        self.store.put(path, value)
        _answered(fault)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        size = len(self.store.objects.get(path, ()))
        first, stop, _step = slice(start, end).indices(size)
        fault = await self.store.request("get", path, first, max(first, stop))
        if path not in self.store.objects:
            raise FileNotFoundError(path)
        _answered(fault)
        return self.store.objects[path][start:end].tobytes()

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        _answered(await self.store.request("look", path))
        if path in self.store.objects:
            return self._entry(path)
        if any(key.startswith(f"{path}/") for key in self.store.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        _answered(await self.store.request("list", path))
        folder = f"{path}/"
        inside = [key for key in self.store.objects if key.startswith(folder)]
        if not inside and path not in self.store.objects:
            raise FileNotFoundError(path)
        folders = {folder + key.removeprefix(folder).partition("/")[0] for key in inside if "/" in key[len(folder) :]}
        entries = [{"name": name, "size": 0, "type": "directory"} for name in sorted(folders)]
        entries += [self._entry(key) for key in inside or [path] if "/" not in key[len(folder) :]]
        return entries if detail else [entry["name"] for entry in entries]

    async def _rm_file(self, path: str, **_: Any) -> None:
        path = self._strip_protocol(path)
        fault = await self.store.request("remove", path)
        if not self.store.drop(path):
            raise FileNotFoundError(path)
        _answered(fault)

    async def _cp_file(self, path1: str, path2: str, **_: Any) -> None:
        fault = await self.store.request("copy", self._strip_protocol(path2))
        self.store.put(self._strip_protocol(path2), self.store.objects[self._strip_protocol(path1)].tobytes())
        _answered(fault)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    async def _mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        pass

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> _File:
        return _File(self, path, mode, block_size or "default", **options)

    def _entry(self, path: str) -> dict[str, Any]:
        size, modified = len(self.store.objects[path]), self.store.modified[path]
        return {"name": path, "size": size, "type": "file", "mtime": modified}


class _File(AbstractBufferedFile):
    """A file that is read with ranged requests, and written in one put or in parts, one after the other."""

    def _initiate_upload(self) -> None:
        self._parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        data = self.buffer.getvalue()
        if final and not self._parts:
            self.fs.pipe_file(self.path, data)
            return True
        if not self._parts:
            self._ask("begin", 0)
        if data:
            self._ask("part", len(data))
            self._parts.append(data)
        if final:
            self._ask("complete", 0)
            self.fs.store.put(self.path, b"".join(self._parts))
        return True

    def discard(self) -> None:
        self._parts = []
        self.buffer = io.BytesIO()

    def _ask(self, operation: str, nbytes: int) -> None:
        _answered(fsspec.asyn.sync(self.fs.loop, self.fs.store.request, operation, self.path, 0, nbytes))

"""RemoteFolder: a folder that fsspec reaches.

A put must be atomic, as it is in object stores. Every request has a time limit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import Any

import numpy as np

from torch_xla_ckpt.protocols import Bytes, Entry, Folder, Sink, Version, Window
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage.file_errors import FileChanged
from torch_xla_ckpt.storage.file_names import require_inside
from torch_xla_ckpt.storage.location import Location
from torch_xla_ckpt.storage.pieces import whole
from torch_xla_ckpt.storage.remote_requests import ByteRange, Requests
from torch_xla_ckpt.storage.s3 import S3Requests

logger = logging.getLogger(__name__)

_REQUEST_BYTES = 16 << 20  # longer reads are cut into several requests, which run at the same time
# Protocols whose backends can create a file only if there is none (fsspec's mode="create").
_CAN_CREATE = frozenset(("abfs", "abfss", "az", "gcs", "gs"))

# fsspec's memory filesystem is in this process, so a lock makes comparing and replacing one step.
_memory_lock = threading.Lock()


@forks.in_child
def _renew_memory_lock() -> None:
    global _memory_lock
    _memory_lock = threading.Lock()


class RemoteFolder(Folder):
    """A folder that fsspec reaches.

    Args:
        location: the folder's location, which must not be local.
    """

    remote = True

    def __init__(self, location: Location):
        self.url = location.url
        self._location = location
        self._requests = Requests(location)
        self._fs = self._requests.fs
        self._s3 = S3Requests(self._requests) if hasattr(self._fs, "call_s3") else None

    def make(self) -> None:
        # An object store has no folders, and for a misspelt path fsspec would make a bucket.
        if not self._location.is_object_store:
            self._requests.call("make", 0, self._fs.makedirs, self._requests.path, exist_ok=True)

    def settle(self) -> None:
        self._requests.settle()

    def names(self) -> list[str]:
        return list(self.listing())

    def listing(self) -> dict[str, Entry]:
        return {
            name: Entry(int(entry.get("size") or 0), _modified(entry))
            for name, entry in self._list().items()
            if entry["type"] != "directory"
        }

    def folders(self) -> list[str]:
        return [name for name, entry in self._list().items() if entry["type"] == "directory"]

    def is_file(self, name: str) -> bool:
        try:
            return self._requests.kind(name) == "file"
        except FileNotFoundError:
            return False

    def size(self, name: str) -> int:
        require_inside(name)
        return self._requests.size(name)

    def missing(self, files: Mapping[str, int], listed: Collection[str] | None = None) -> list[str]:
        # One request lists all files. A listing can lag behind, so a file that it lacks is asked for by its name.
        listed = self.listing() if listed is None else listed
        return sorted(name for name in files if name not in listed and not self._is_there(name))

    def read(self, name: str) -> bytes:
        return self._read(name)[0]

    def version(self, name: str) -> Version:
        try:
            return Version.of(*self._read(name))
        except FileNotFoundError:
            return Version.none()

    def create(self, name: str, *, replaces: bool = False) -> _RemoteSink:
        return _RemoteSink(self._requests, name, replaces)

    def put(self, name: str, data: bytes) -> None:
        self._requests.call(f"write {name}", len(data), self._fs.pipe_file, self._requests.full_path(name), data)

    def replace(
        self,
        name: str,
        data: Iterable[Bytes],
        temporary: str,
        *,
        expected: Version | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._replace(name, whole(data), expected, check)

    def _replace(self, name: str, data: bytes, expected: Version | None, check: Callable[[], None] | None) -> None:
        if check is not None:
            check()
        if expected is None:
            self._put_remembered(name, data)
        elif self._s3 is not None:
            if not self._s3.put_if(name, data, expected):
                logger.warning(
                    "%s has no conditional puts, so two programs that save there at the same time may both succeed. "
                    "Let only one program save to a path",
                    self.url,
                )
                self._compare_and_put(name, data, expected)
        elif "memory" in self._protocols():
            with _memory_lock:
                self._compare_and_put(name, data, expected)
        elif not expected.exists and not _CAN_CREATE.isdisjoint(self._protocols()):
            self._put_new(name, data)
        else:
            self._compare_and_put(name, data, expected)

    def append(self, name: str, line: bytes) -> None:
        try:
            before = self.read(name)
        except FileNotFoundError:
            before = b""
        if before and not before.endswith(b"\n"):  # the previous line was cut off
            before += b"\n"
        self.put(name, before + line + b"\n")

    def flush(self) -> None:
        pass

    def remove(self, names: Sequence[str]) -> None:
        paths = [self._requests.full_path(name) for name in names]
        if self._s3 is not None and paths:
            is_metadata = any(path.endswith(METADATA) for path in paths)
            with self._requests.remembered(f"remove {paths[0]}") if is_metadata else nullcontext():
                self._s3.remove(paths)
            return
        failed: list[tuple[str, Exception]] = []
        for path in paths:
            try:
                with self._requests.remembered(f"remove {path}") if path.endswith(METADATA) else nullcontext():
                    self._requests.call(f"remove {path}", 0, self._fs.rm_file, path)
            except FileNotFoundError:
                pass
            except Exception as error:
                failed.append((path, error))
        if failed:
            first, why = failed[0]
            raise OSError(
                f"{len(failed)} of {len(paths)} files in {self.url} could not be removed, the first is {first}: {why}"
            ) from why

    def abort_uploads(self, matches: Callable[[str], bool]) -> None:
        if self._s3 is not None:  # other stores drop unfinished uploads by themselves
            self._s3.abort_uploads(matches)

    def view(self, windows: Sequence[Window]) -> list[memoryview]:
        for window in windows:
            require_inside(window.name)
        # Untouched pages of an empty array cost no memory, so a window may be larger than its parts.
        buffers = [np.empty(window.stop - window.start, dtype=np.uint8) for window in windows]
        ends = [window.stop - window.start for window in windows]
        ranges = [
            (number, ByteRange(window.name, start, min(start + _REQUEST_BYTES, stop)))
            for number, window in enumerate(windows)
            for first, stop in window.parts
            for start in range(first, stop, _REQUEST_BYTES)
        ]
        answers = self._requests.read_ranges([wanted for _, wanted in ranges])
        for (number, wanted), data in zip(ranges, answers):
            position = wanted.start - windows[number].start
            buffers[number][position : position + len(data)] = np.frombuffer(data, dtype=np.uint8)
            if len(data) < wanted.stop - wanted.start:
                ends[number] = min(ends[number], position + len(data))
        return [buffer.data[:end] for buffer, end in zip(buffers, ends)]

    def forget(self, name: str, start: int, stop: int) -> None:
        pass

    def release(self) -> None:
        pass

    def _list(self) -> dict[str, dict[str, Any]]:
        """Return fsspec's entry for each file and folder in this folder, by name."""
        self._requests.forget_listing()
        try:
            entries = self._requests.call("list", 0, self._fs.ls, self._requests.path, detail=True)
        except FileNotFoundError:
            return {}
        # An object can have the folder's own path, and is not in the folder.
        inside = ((entry["name"].rstrip("/"), entry) for entry in entries)
        return {path.rpartition("/")[2]: entry for path, entry in inside if path != self._requests.path}

    def _read(self, name: str) -> tuple[bytes, str | None]:
        """Return a file's bytes, and the store's tag of this version; None if the store has no tags."""
        self._requests.forget_listing()
        if self._s3 is not None:
            return self._s3.read(name)
        return self._requests.call(f"read {name}", 0, self._fs.cat_file, self._requests.full_path(name)), None

    def _is_there(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def _put_new(self, name: str, data: bytes) -> None:
        """Put a file if there is none, in one step."""
        path = self._requests.full_path(name)
        try:
            self._requests.call(f"write {name}", len(data), self._fs.pipe_file, path, data, mode="create")
        except FileExistsError as error:
            raise FileChanged(name) from error

    def _compare_and_put(self, name: str, data: bytes, expected: Version) -> None:
        if not self.version(name).is_same(expected):
            raise FileChanged(name)
        self._put_remembered(name, data)

    def _put_remembered(self, name: str, data: bytes) -> None:
        with self._requests.remembered(f"write {name}"):
            self.put(name, data)

    def _protocols(self) -> frozenset[str]:
        named = self._fs.protocol
        return frozenset((named,) if isinstance(named, str) else named)


class _RemoteSink(Sink):
    """A remote file being written.

    Args:
        requests: the requests to the file's folder.
        name: the file's name.
        replaces: whether there may be an older file of this name.
    """

    def __init__(self, requests: Requests, name: str, replaces: bool):
        self._requests = requests
        self._name = name
        self._replaces = replaces
        self._path = requests.full_path(name)
        self._owner = forks.Owner()
        self._file = requests.call(f"write {name}", 0, requests.fs.open, self._path, "wb")
        forks.renew_in_child(self, _RemoteSink._forsake)

    def _forsake(self) -> None:
        """In a forked child: do not upload the parent's bytes when the file object is deleted, as fsspec would."""
        with suppress(Exception):
            self._file.closed = True

    def write(self, data: Bytes) -> None:
        self._requests.call(f"write {self._name}", len(data) + self._buffered(), self._file.write, data)

    def close(self) -> None:
        self._requests.call(f"write {self._name}", self._buffered(), self._file.close)

    def abandon(self) -> None:
        if not self._owner.is_here:  # in a forked child: the save goes on in the parent
            return
        # Closing the file would publish it. An error here would hide the error that made the save fail.
        with suppress(Exception):
            self._requests.call(f"give up {self._name}", 0, self._file.discard)
        with suppress(Exception):
            self._file.closed = True
        if self._replaces:
            return
        with suppress(Exception):
            self._requests.call(f"remove {self._name}", 0, self._requests.fs.rm_file, self._path)

    def _buffered(self) -> int:
        """Return the most bytes that fsspec holds back, and sends with the next ones."""
        return int(getattr(self._file, "blocksize", 0) or 0)


def _modified(entry: Mapping[str, Any]) -> float | None:
    """Return when a file was last written, in seconds of the store's clock; None if the store does not tell."""
    for key in ("LastModified", "last_modified", "updated", "mtime", "modified", "created"):
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return None

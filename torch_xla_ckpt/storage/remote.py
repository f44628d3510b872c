"""RemoteFolder: a folder that fsspec reaches.

A put must be atomic, as it is in object stores. Every request has a time limit.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np

from torch_xla_ckpt.protocols import Bytes, Entry, Folder, Sink, Version, Window
from torch_xla_ckpt.reports import RequestCounts
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage.deadline import together
from torch_xla_ckpt.storage.file_names import require_inside
from torch_xla_ckpt.storage.location import Location
from torch_xla_ckpt.storage.pieces import whole
from torch_xla_ckpt.storage.remote_replacing import Replacing
from torch_xla_ckpt.storage.remote_requests import ByteRange, Requests
from torch_xla_ckpt.storage.remote_sinks import FileSink, ObjectSink
from torch_xla_ckpt.storage.s3 import S3Requests
from torch_xla_ckpt.storage.s3_upload import S3Sink, single_bytes

logger = logging.getLogger(__name__)

_REQUEST_BYTES = 16 << 20  # reads of more than about 1.5 times this are cut into requests that run at the same time
_RANGES_AT_ONCE = 8  # requests of one call of ``view`` that run at the same time
_SINGLE_BYTES = 48 << 20  # larger files are sent in several requests


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
        self._replacing = Replacing(self._requests, self._s3, self.version)
        self.refuses_parts = self._s3 is not None

    def __reduce__(self) -> Any:
        return RemoteFolder, (self._location,)

    def make(self) -> None:
        # An object store has no folders, and for a misspelt path fsspec would make a bucket.
        if not self._location.is_object_store:
            self._requests.within("make", 0, self._fs.makedirs, self._requests.path, exist_ok=True)

    def settle(self) -> None:
        self._requests.settle()

    def has_late_puts(self) -> bool:
        return self._requests.has_late_puts()

    def counts(self) -> RequestCounts:
        return self._requests.counts()

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

        def is_listed(name: str, size: int) -> bool:
            return name in listed and (not isinstance(listed, Mapping) or listed[name].size == size)

        missing: list[str] = []

        def look(name: str, size: int) -> None:
            if not self._has(name, size):
                missing.append(name)

        together([partial(look, name, size) for name, size in files.items() if not is_listed(name, size)])
        return sorted(missing)

    def read(self, name: str) -> bytes:
        return self._read(name)[0]

    def version(self, name: str) -> Version:
        try:
            return Version.of(*self._read(name))
        except FileNotFoundError:
            return Version.none()

    def create(self, name: str, *, replaces: bool = False, unchanged: bool = False) -> Sink:
        most = _SINGLE_BYTES if self._s3 is None else single_bytes(self._requests)
        stream = partial(self._stream, name, replaces)
        return ObjectSink(self._requests, name, most, stream, unchanged=unchanged)

    def put(self, name: str, data: bytes) -> None:
        self._requests.put(name, data)

    def replace(
        self,
        name: str,
        data: Iterable[Bytes],
        temporary: str,
        *,
        expected: Version | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        # A put may be made again, and pieces can be taken once only.
        self._replacing.replace(name, whole(data), expected, check)

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
        commits = [path for path in paths if path.endswith(METADATA)]
        if not paths:
            return
        self._requests.wait_for_late_puts(names)
        if self._s3 is not None:
            with self._requests.remembered(f"remove {paths[0]}", if_late=bool(commits)):
                self._s3.remove(paths)
            return
        failed: dict[str, Exception] = {}

        def remove(path: str) -> None:
            try:
                if path in commits:  # not repeated: another save may have committed since the first attempt
                    with self._requests.remembered(f"remove {path}"):
                        self._requests.call(f"remove {path}", 0, self._fs.rm_file, path)
                else:
                    self._requests.repeat(f"remove {path}", 0, lambda: self._fs.rm_file(path))
            except FileNotFoundError:
                pass
            except Exception as error:
                failed[path] = error

        together([partial(remove, path) for path in paths])
        if failed:
            first, why = min(failed.items())
            raise OSError(
                f"{len(failed)} of {len(paths)} files in {self.url} could not be removed, the first is {first}: {why}"
            ) from why

    def abort_uploads(self, matches: Callable[[str], bool]) -> None:
        if self._s3 is not None:  # other stores drop unfinished uploads by themselves
            self._s3.abort_uploads(matches)

    def view(self, windows: Sequence[Window]) -> list[memoryview]:
        for window in windows:
            require_inside(window.name)
        self._requests.forget_listing()
        ranges = [
            (number, ByteRange(window.name, first, last))
            for number, window in enumerate(windows)
            for start, stop in window.parts
            for first, last in _cut(start, stop)
        ]
        answers = Counter(number for number, _ in ranges)
        # Untouched pages of an empty array cost no memory, so a window may be larger than its parts. A window that one
        # request answers needs no array: its view is the answer.
        arrays = [
            None
            if answers[number] == 1 and window.parts == ((window.start, window.stop),)
            else np.empty(window.stop - window.start, dtype=np.uint8)
            for number, window in enumerate(windows)
        ]
        views = [memoryview(b"") if array is None else array.data for array in arrays]
        early: list[tuple[int, int]] = []  # windows whose file ends early, and the end in the window

        def read(number: int, wanted: ByteRange) -> None:
            data = self._requests.read_range(wanted)
            array, position = arrays[number], wanted.start - windows[number].start
            if array is None:
                views[number] = memoryview(data)
                return
            array[position : position + len(data)] = np.frombuffer(data, dtype=np.uint8)
            if len(data) < wanted.stop - wanted.start:
                early.append((number, position + len(data)))

        together([partial(read, number, wanted) for number, wanted in ranges], _RANGES_AT_ONCE)
        for number, end in early:
            views[number] = views[number][:end]
        return views

    def forget(self, name: str, start: int, stop: int) -> None:
        pass

    def release(self) -> None:
        pass

    def _list(self) -> dict[str, dict[str, Any]]:
        """Return fsspec's entry for each file and folder in this folder, by name."""
        self._requests.forget_listing()
        try:
            entries = self._requests.repeat("list", 0, lambda: self._fs.ls(self._requests.path, detail=True))
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
        path = self._requests.full_path(name)
        return self._requests.repeat(f"read {name}", 0, lambda: self._fs.cat_file(path)), None

    def _has(self, name: str, size: int) -> bool:
        try:
            return self.size(name) == size
        except FileNotFoundError:
            return False

    def _stream(self, name: str, replaces: bool) -> Sink:
        """Open a file to be written piece by piece."""
        kind = FileSink if self._s3 is None else S3Sink
        return kind(self._requests, name, replaces)


def _cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut a range of bytes into equal ranges, each for one request, of about ``_REQUEST_BYTES``."""
    length = max(1, math.ceil((stop - start) / max(1, round((stop - start) / _REQUEST_BYTES))))
    for first in range(start, stop, length):
        yield first, min(first + length, stop)


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

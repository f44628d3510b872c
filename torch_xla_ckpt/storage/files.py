"""A checkpoint's folder: on a local disk, or wherever fsspec reaches.

Everything this package does to files goes through a ``Folder``, so this module is the whole list of what can happen
to them.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import fsspec
import numpy as np
from fsspec.core import url_to_fs

from torch_xla_ckpt import forks
from torch_xla_ckpt.errors import UnsafeObjectError
from torch_xla_ckpt.storage.frame import Bytes

logger = logging.getLogger(__name__)

# A remote read is cut into requests of this many bytes, which run at the same time.
_REQUEST_BYTES = 16 << 20
# Requests that failed on the way are made again this often, beside what the fsspec backend does of itself.
_ATTEMPTS = 3
# fsspec's protocols without folders.
_OBJECT_STORES = frozenset(("abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "oci", "oss", "r2", "s3", "s3a"))


@dataclass(frozen=True)
class Window:
    """Bytes of a file that are wanted together.

    Args:
        name: of the file.
        start, stop: the bytes of which a view is wanted.
        parts: the byte ranges within them that will be looked at, ascending; the others may hold anything.
    """

    name: str
    start: int
    stop: int
    parts: tuple[tuple[int, int], ...]


class Sink(Protocol):
    """A file being written."""

    def write(self, data: Bytes) -> None: ...

    def close(self) -> None:
        """Finish the file; with ``sync`` it is on stable storage afterwards."""

    def abandon(self) -> None:
        """Leave nothing behind, as far as that is possible."""


class Folder(Protocol):
    """Files by name, all in one place."""

    url: str
    remote: bool

    def make(self) -> None:
        """Create the folder if it is not there."""

    def names(self) -> list[str]:
        """All files; none when there is no folder."""

    def size(self, name: str) -> int: ...

    def missing(self, files: Mapping[str, int]) -> list[str]:
        """Which of these files, given with their sizes, are not here."""

    def read(self, name: str) -> bytes: ...

    def create(self, name: str) -> Sink: ...

    def replace(self, name: str, data: bytes, temporary: str) -> None:
        """Write a whole file in one step: afterwards, and after a crash, it is the old one or the new one.

        ``temporary`` names the file to use on the way where the storage needs one.
        """

    def append(self, name: str, line: bytes) -> None:
        """Add a line to a file, which is made if it is not there. Where files cannot grow, it is written anew."""

    def flush(self) -> None:
        """With ``sync``: make the names of new files stable."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; those that are gone already are fine."""

    def abort_uploads(self, of: Callable[[str], bool]) -> None:
        """Drop what dead processes have uploaded of files with such names, which nobody sees but the bill."""

    def view(self, windows: Sequence[Window]) -> list[memoryview]:
        """The bytes of each window; shorter where the file ends before.

        Raises:
            FileNotFoundError: naming the file in ``filename``.
        """

    def forget(self, name: str, start: int, stop: int) -> None:
        """Say that these bytes will not be looked at again, so that they need not stay in memory."""

    def release(self) -> None:
        """Let go of what was kept for further views. Views stay valid."""


def open_folder(
    path: str | os.PathLike[str], *, sync: bool = True, storage_options: Mapping[str, Any] | None = None
) -> Folder:
    """The folder at a local path or fsspec URL.

    Args:
        path: where.
        sync: whether what is written must survive a power failure (local files; object stores always do).
        storage_options: for fsspec's filesystem.
    """
    text = os.fspath(path)
    if "://" not in text and "::" not in text:
        return LocalFolder(text, sync)
    filesystem, inner = url_to_fs(text, **(storage_options or {}))
    is_local = "file" in _protocols(filesystem)
    return LocalFolder(inner, sync) if is_local else RemoteFolder(text, filesystem, inner)


def _protocols(filesystem: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    named = filesystem.protocol
    return (named,) if isinstance(named, str) else tuple(named)


def check_inside(name: str) -> None:
    """Refuse the name of a file that does not lie in the checkpoint's folder.

    Names come out of files that somebody else may have written.

    Raises:
        UnsafeObjectError: it leads elsewhere.
    """
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name or ":" in parts[0] or any(part in ("", ".", "..") for part in parts):
        raise UnsafeObjectError(f"refused to open {name!r}: the checkpoint names a file outside of its folder")


class LocalFolder:
    """A folder of the operating system; reads are memory maps."""

    remote = False

    def __init__(self, path: str, sync: bool):
        self.url = path
        self._path = Path(path)
        self._sync = sync
        self._renew()
        forks.renew_in_child(self, LocalFolder._renew)

    def _renew(self) -> None:
        self._maps: dict[str, mmap.mmap | None] = {}  # None for an empty file, which cannot be mapped
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return LocalFolder, (self.url, self._sync)

    def make(self) -> None:
        new = [folder for folder in (self._path, *self._path.parents) if not folder.exists()]
        os.makedirs(self._path, exist_ok=True)
        for folder in new:
            self._sync_folder(folder.parent)

    def names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int:
        check_inside(name)
        return os.stat(self._path / name).st_size

    def missing(self, files: Mapping[str, int]) -> list[str]:
        # Not by listing: network file systems list late what other hosts have written.
        return [name for name, size in files.items() if not self._has(name, size)]

    def _has(self, name: str, size: int) -> bool:
        try:
            return self.size(name) == size
        except FileNotFoundError:
            return False

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def create(self, name: str) -> _LocalSink:
        return _LocalSink(self._path / name, self._sync)

    def replace(self, name: str, data: bytes, temporary: str) -> None:
        sink = self.create(temporary)
        try:
            sink.write(data)
            sink.close()
            os.replace(self._path / temporary, self._path / name)
        except BaseException:
            sink.abandon()
            raise
        self.flush()

    def append(self, name: str, line: bytes) -> None:
        with open(self._path / name, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the line before was cut off
                    line = b"\n" + line
            file.write(line + b"\n")

    def flush(self) -> None:
        self._sync_folder(self._path)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(self._path / name)

    def abort_uploads(self, of: Callable[[str], bool]) -> None:
        pass

    def view(self, windows: Sequence[Window]) -> list[memoryview]:
        return [memoryview(self._map(window.name) or b"")[window.start : window.stop] for window in windows]

    def forget(self, name: str, start: int, stop: int) -> None:
        mapped = self._map(name)
        page = mmap.PAGESIZE
        first, last = -(-start // page) * page, stop // page * page
        if mapped is not None and first < last and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def release(self) -> None:
        with self._lock:
            self._maps = {}

    def _map(self, name: str) -> mmap.mmap | None:
        with self._lock:
            if name not in self._maps:
                check_inside(name)
                with open(self._path / name, "rb") as file:
                    empty = not os.fstat(file.fileno()).st_size
                    # Copy-on-write: tensors over the map may be written to, which never reaches the file.
                    self._maps[name] = None if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return self._maps[name]

    def _sync_folder(self, path: Path) -> None:
        if self._sync:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class _LocalSink:
    def __init__(self, path: Path, sync: bool):
        self._path = path
        self._sync = sync
        self._owner = forks.Owner()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        self._open = True

    def write(self, data: Bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        try:
            if self._sync:
                os.fsync(self._file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        finally:
            self._close()

    def abandon(self) -> None:
        with suppress(OSError):
            self._close()
        if not self._owner.is_here:  # a forked child unwinds its parent's save, which goes on
            return
        with suppress(OSError):  # it is named after a save that is never committed; the next one removes it
            os.unlink(self._path)

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._file)


class RemoteFolder:
    """A folder that fsspec reaches. A put must be atomic, as it is in object stores."""

    remote = True

    def __init__(self, url: str, filesystem: fsspec.AbstractFileSystem, path: str):
        self.url = url
        self._fs = filesystem
        self._path = path.rstrip("/")

    def make(self) -> None:
        # An object store has no folders, and making one there would make a bucket of a misspelt name.
        if not _OBJECT_STORES.intersection(_protocols(self._fs)):
            self._fs.makedirs(self._path, exist_ok=True)

    def names(self) -> list[str]:
        self._forget_listing()
        try:
            listed = self._fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [name.rstrip("/").rpartition("/")[2] for name in listed]

    def size(self, name: str) -> int:
        check_inside(name)
        self._forget_listing()
        return int(self._fs.info(self._full(name))["size"])

    def missing(self, files: Mapping[str, int]) -> list[str]:
        # One request for all of them.
        return sorted(set(files) - set(self.names()))

    def read(self, name: str) -> bytes:
        self._forget_listing()
        return self._fs.cat_file(self._full(name))

    def create(self, name: str) -> _RemoteSink:
        return _RemoteSink(self._fs, self._full(name))

    def replace(self, name: str, data: bytes, temporary: str) -> None:
        self._fs.pipe_file(self._full(name), data)

    def append(self, name: str, line: bytes) -> None:
        try:
            before = self.read(name)
        except FileNotFoundError:
            before = b""
        self.replace(name, before + line + b"\n", "")

    def flush(self) -> None:
        pass

    def remove(self, names: Sequence[str]) -> None:
        if names:
            with suppress(FileNotFoundError):
                self._fs.rm([self._full(name) for name in names])

    def abort_uploads(self, of: Callable[[str], bool]) -> None:
        call = getattr(self._fs, "call_s3", None)  # other stores drop them by themselves
        if call is None:
            return
        bucket, _, folder = self._path.partition("/")
        try:
            prefix = f"{folder}/" if folder else ""
            found = call("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            for upload in found.get("Uploads", ()):
                if of(upload["Key"].removeprefix(prefix)):  # and not what lies in folders below
                    call("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        except Exception as error:  # it may not be allowed; nothing is lost but a little money
            logger.info("unfinished uploads in %s were not looked for: %s", self.url, error)

    def view(self, windows: Sequence[Window]) -> list[memoryview]:
        for window in windows:
            check_inside(window.name)
        # Untouched pages of an empty array cost no memory, so a window may be larger than its parts.
        buffers = [np.empty(window.stop - window.start, dtype=np.uint8) for window in windows]
        ends = [window.stop - window.start for window in windows]
        requests = [
            _Request(number, window.name, start, min(start + _REQUEST_BYTES, stop))
            for number, window in enumerate(windows)
            for first, stop in window.parts
            for start in range(first, stop, _REQUEST_BYTES)
        ]
        for request, data in zip(requests, self._get(requests)):
            place = request.start - windows[request.window].start
            buffers[request.window][place : place + len(data)] = np.frombuffer(data, dtype=np.uint8)
            if len(data) < request.stop - request.start:
                ends[request.window] = min(ends[request.window], place + len(data))
        return [buffer.data[:end] for buffer, end in zip(buffers, ends)]

    def forget(self, name: str, start: int, stop: int) -> None:
        pass

    def release(self) -> None:
        pass

    def _get(self, requests: Sequence[_Request]) -> list[bytes]:
        """The answers to byte-range requests; those that failed on the way are made again."""
        self._forget_listing()
        answers: dict[int, bytes] = {}
        for attempt in range(1, _ATTEMPTS + 1):
            asked = [number for number in range(len(requests)) if number not in answers]
            if not asked:
                break
            got = self._fs.cat_ranges(
                [self._full(requests[number].name) for number in asked],
                [requests[number].start for number in asked],
                [requests[number].stop for number in asked],
                on_error="return",
            )
            for number, answer in zip(asked, got):
                request = requests[number]
                if isinstance(answer, FileNotFoundError):
                    raise FileNotFoundError(errno.ENOENT, "no such file", request.name)
                if not isinstance(answer, BaseException):
                    answers[number] = answer
                elif not isinstance(answer, Exception):
                    raise answer
                elif self.size(request.name) <= request.start:  # which object stores call an error
                    answers[number] = b""
                elif attempt == _ATTEMPTS:
                    raise answer
        return [answers[number] for number in range(len(requests))]

    def _forget_listing(self) -> None:
        """fsspec remembers what it has listed, and then does not find what others have written since."""
        self._fs.invalidate_cache(self._path)

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}"


class _Request(NamedTuple):
    """Bytes to ask for, and the number of the window they belong to."""

    window: int
    name: str
    start: int
    stop: int


class _RemoteSink:
    def __init__(self, filesystem: fsspec.AbstractFileSystem, path: str):
        self._fs = filesystem
        self._path = path
        self._owner = forks.Owner()
        self._file = filesystem.open(path, "wb")
        forks.renew_in_child(self, _RemoteSink._forsake)

    def _forsake(self) -> None:
        """In a forked child: never upload the parent's bytes. fsspec would when it deletes the file object."""
        with suppress(Exception):
            self._file.closed = True

    def write(self, data: Bytes) -> None:
        self._file.write(data)

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        if not self._owner.is_here:  # a forked child unwinds its parent's save, which goes on
            return
        # Closing would publish what is there. What went wrong before is the error to report, not what goes wrong here.
        with suppress(Exception):
            self._file.discard()
        with suppress(Exception):
            self._file.closed = True
        with suppress(Exception):
            self._fs.rm_file(self._path)

"""A checkpoint's folder: on a local disk, or wherever fsspec reaches.

Everything this package does to files goes through a ``Folder``, so this module is the whole list of what can happen
to them.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch_xla_ckpt.errors import UnsafeObjectError
from torch_xla_ckpt.protocols import Bytes, Entry, Version, Window
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.filelock import locked

logger = logging.getLogger(__name__)

TRANSIT = (
    "an answer of %s was wrong (%s). The same request, made a second time, got what was written, so the checkpoint is "
    "not damaged. If this happens again, check the network and the store"
)
"""The warning about bytes that a remote store garbled once; for the URL and what was wrong."""

NOT_A_FILE = "there is a folder, a pipe, a socket or a device in the place of the file"


class NotAFile(OSError):
    """Something that is neither a file nor a folder has the name of a file: a pipe, a socket or a device."""


class FileChanged(Exception):
    """A file is no longer the version that was to be replaced."""


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

    def settle(self) -> None:
        pass

    def names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def listing(self) -> dict[str, Entry]:
        found = {}
        for name in self.names():
            with _passing_over_dead_links():
                status = os.stat(self._path / name)
                found[name] = Entry(status.st_size, status.st_mtime)
        return found

    def folders(self) -> list[str]:
        found = []
        with suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                with _passing_over_dead_links():
                    if entry.is_dir():
                        found.append(entry.name)
        return found

    def size(self, name: str) -> int:
        check_inside(name)
        with _impossible_is_missing(name):
            return os.stat(self._path / name).st_size

    def missing(self, files: Mapping[str, int], listed: Collection[str] | None = None) -> list[str]:
        # Not by listing: network file systems list late what other hosts have written.
        return [name for name, size in files.items() if not self._has(name, size)]

    def _has(self, name: str, size: int) -> bool:
        try:
            return self.size(name) == size
        except FileNotFoundError:
            return False

    def read(self, name: str) -> bytes:
        with self._opened(name) as file:
            return file.read()

    def version(self, name: str) -> Version:
        try:
            return Version.of(self.read(name))
        except FileNotFoundError:
            return Version.none()

    def create(self, name: str) -> _LocalSink:
        return _LocalSink(self._path / name, self._sync)

    def put(self, name: str, data: bytes) -> None:
        file = os.open(self._path / name, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            os.write(file, data)
            os.ftruncate(file, len(data))  # afterwards, so that a file that is written again is never empty
        finally:
            os.close(file)

    def replace(
        self,
        name: str,
        data: bytes,
        temporary: str,
        *,
        expected: Version | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        sink = self.create(temporary)
        try:
            sink.write(data)
            sink.close()
            with nullcontext() if expected is None else locked(self._path):
                if expected is not None and not self.version(name).is_same(expected):
                    raise FileChanged(name)
                if look is not None:
                    look()
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
                with self._opened(name) as file:
                    empty = not os.fstat(file.fileno()).st_size
                    # Copy-on-write: tensors over the map may be written to, which never reaches the file.
                    self._maps[name] = None if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return self._maps[name]

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for reading. What is no file is refused, and never waited for."""
        path = self._path / name
        with _impossible_is_missing(name), open(path, "rb", opener=_open_at_once) as file:  # which refuses folders
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise NotAFile(errno.EINVAL, "this is a pipe, a socket or a device, and not a file", str(path))
            yield file

    def _sync_folder(self, path: Path) -> None:
        if self._sync:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@contextmanager
def _passing_over_dead_links() -> Iterator[None]:
    """Pass over an entry of a folder that leads nowhere: a link to nothing, to itself, or to where nobody may go."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            raise


@contextmanager
def _impossible_is_missing(name: str) -> Iterator[None]:
    """Say that a file is missing if its name is one that the file system cannot have, or leads to a link to itself."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise FileNotFoundError(errno.ENOENT, "no file can have this name", name) from error
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise FileNotFoundError(errno.ENOENT, "no file can have this name", name) from error
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise NotAFile(error.errno, "this is a socket or a device, and not a file", name) from error
        raise


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

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Protocol

import xxhash

from torch_xla_ckpt import forks
from torch_xla_ckpt.errors import UnsafeObjectError
from torch_xla_ckpt.storage.filelock import locked
from torch_xla_ckpt.storage.frame import Bytes
from torch_xla_ckpt.storage.location import Location

logger = logging.getLogger(__name__)

TRANSIT = (
    "an answer of %s was wrong (%s). The same request, made a second time, got what was written, so the checkpoint is "
    "not damaged. If this happens again, check the network and the store"
)
"""The warning about bytes that a remote store garbled once; for the URL and what was wrong."""

NOT_A_FILE = "there is a folder, a pipe, a socket or a device in the place of the file"


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


class Entry(NamedTuple):
    """A file in a listing.

    Args:
        size: bytes.
        modified: when it was last written, in seconds of the storage's clock; None if the storage does not tell.
    """

    size: int
    modified: float | None


@dataclass(frozen=True)
class Version:
    """What a file held when it was read, to be compared before the file is replaced.

    Args:
        digest: a digest of its bytes; None if there was no file.
        end: its last bytes, at most ``ENDING`` of them.
        tag: the store's own name for this version, an ETag for example; None if the store has none.
    """

    digest: bytes | None
    end: bytes = b""
    tag: str | None = None

    ENDING: ClassVar[int] = 256

    @classmethod
    def of(cls, data: bytes, tag: str | None = None) -> Version:
        """Return the version of a file that holds ``data``."""
        return cls(xxhash.xxh3_128_digest(data), data[-cls.ENDING :], tag)

    @classmethod
    def none(cls) -> Version:
        """Return the version of a file that is not there."""
        return cls(None)

    @property
    def exists(self) -> bool:
        return self.digest is not None

    def is_same(self, other: Version) -> bool:
        """Whether both hold the same bytes, or both are not there."""
        return self.digest == other.digest


class NotAFile(OSError):
    """Something that is neither a file nor a folder has the name of a file: a pipe, a socket or a device."""


class FileChanged(Exception):
    """A file is no longer the version that was to be replaced."""


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

    def settle(self) -> None:
        """Wait for earlier requests of this process that may still replace or remove the checkpoint here.

        They were given up on, because the store did not answer in time.

        Raises:
            CheckpointError: they do not end within the time limit of one request.
        """

    def names(self) -> list[str]:
        """All files; none when there is no folder."""

    def listing(self) -> dict[str, Entry]:
        """All files by name, with their sizes and times."""

    def folders(self) -> list[str]:
        """Return the names of the folders in this one. A link counts as what it leads to."""

    def size(self, name: str) -> int: ...

    def missing(self, files: Mapping[str, int], listed: Collection[str] | None = None) -> list[str]:
        """Return which of these files are not here.

        Args:
            files: names, with sizes in bytes.
            listed: the names that a listing made just now has, where there was one.
        """

    def read(self, name: str) -> bytes: ...

    def version(self, name: str) -> Version:
        """Return what a file holds now, whether it is there or not."""

    def create(self, name: str) -> Sink: ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file. A power failure may undo it."""

    def replace(
        self,
        name: str,
        data: bytes,
        temporary: str,
        *,
        expected: Version | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Write a whole file in one step: afterwards, and after a crash, it is the old one or the new one.

        Args:
            name: the file.
            data: its new bytes.
            temporary: the file to use on the way where the storage needs one.
            expected: replace the file only if it still is this version. Comparing and replacing is one step on local
                disks, in S3 and in memory. Elsewhere it is one step only for a file that is not there yet.
            look: called before the file is replaced, and what it raises is raised. With ``expected`` on a local disk
                it is part of that one step.

        Raises:
            FileChanged: the file is another version.
        """

    def append(self, name: str, line: bytes) -> None:
        """Add a line to a file, which is made if it is not there. Where files cannot grow, it is written anew."""

    def flush(self) -> None:
        """With ``sync``: make the names of new files stable."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; those that are gone already are fine.

        Raises:
            OSError: some are still there.
        """

    def abort_uploads(self, of: Callable[[str], bool]) -> None:
        """Drop what dead processes have uploaded of files with such names, which nobody sees but the bill."""

    def view(self, windows: Sequence[Window]) -> list[memoryview]:
        """The bytes of each window; shorter where the file ends before.

        Raises:
            FileNotFoundError, NotAFile, IsADirectoryError: naming the file in ``filename``.
        """

    def forget(self, name: str, start: int, stop: int) -> None:
        """Say that these bytes will not be looked at again, so that they need not stay in memory."""

    def release(self) -> None:
        """Let go of what was kept for further views. Views stay valid."""


def open_folder(location: Location, *, sync: bool = True) -> Folder:
    """Return the folder at a location.

    Args:
        location: where it lies.
        sync: whether what is written must survive a power failure (local files; object stores always do).
    """
    if location.is_local:
        return LocalFolder(location.path, sync)
    from torch_xla_ckpt.storage.remote import RemoteFolder

    return RemoteFolder(location)


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

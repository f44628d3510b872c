"""LocalFolder: a folder of the operating system.

Every operation on a local file goes through ``LocalFolder`` or its ``_LocalSink``. So this module shows everything that
this package can do to local files.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Bytes, Entry, Folder, Sink, Version, Window
from torch_xla_ckpt.reports import RequestCounts
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.file_errors import FileChanged, NotAFile, impossible_name
from torch_xla_ckpt.storage.file_names import require_inside
from torch_xla_ckpt.storage.filelock import locked
from torch_xla_ckpt.storage.pieces import joined_pieces
from torch_xla_ckpt.storage.seal import sealed_save_id

_PIECE = 1 << 20  # bytes of a file that are read together to compare it


class LocalFolder(Folder):
    """A folder of the operating system, read through memory maps.

    Args:
        path: the absolute path of the folder.
        sync: fsync files and folders, so that they survive a power failure.
    """

    remote = False
    refuses_parts = True

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
        try:
            os.makedirs(self._path, exist_ok=True)
        except FileExistsError as error:
            if not self._path.is_symlink():
                raise
            raise CheckpointError(
                f"{self._path} is a link to {os.readlink(self._path)}, which is no folder. Nothing was written. Create "
                "that folder, or remove the link"
            ) from error
        for folder in new:
            self._sync_folder(folder.parent)

    def settle(self) -> None:
        pass

    def counts(self) -> RequestCounts:
        return RequestCounts()

    def names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def listing(self) -> dict[str, Entry]:
        entries = {}
        for name in self.names():
            with _skip_dead_links():
                status = os.stat(self._path / name)
                entries[name] = Entry(status.st_size, status.st_mtime)
        return entries

    def folders(self) -> list[str]:
        names = []
        with suppress(FileNotFoundError), os.scandir(self._path) as entries:
            for entry in entries:
                with _skip_dead_links():
                    if entry.is_dir():
                        names.append(entry.name)
        return names

    def is_file(self, name: str) -> bool:
        return os.path.isfile(self._path / name)

    def size(self, name: str) -> int:
        require_inside(name)
        with _missing_if_impossible(name):
            return os.stat(self._path / name).st_size

    def missing(self, files: Mapping[str, int], listed: Collection[str] | None = None) -> list[str]:
        # Each file is asked for by its name, because network file systems list files of other hosts late.
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
            with self._opened(name) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - Version.ENDING))
                end = file.read(Version.ENDING)
                if sealed_save_id(end) is not None:
                    # A seal holds a random save id and the checksum of all bytes before it.
                    return Version.of_end(size, end)
                file.seek(0)
                return Version.of_pieces(_pieces(file))
        except FileNotFoundError:
            return Version.none()

    def create(self, name: str, *, replaces: bool = False, unchanged: bool = False) -> _LocalSink:
        return _LocalSink(self._path / name, self._sync)

    def put(self, name: str, data: bytes) -> None:
        file = os.open(self._path / name, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            os.write(file, data)
            os.ftruncate(file, len(data))  # after the write, so that a file that is written again is never empty
        finally:
            os.close(file)

    def replace(
        self,
        name: str,
        data: Iterable[Bytes],
        temporary: str,
        *,
        expected: Version | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        sink = self.create(temporary)
        try:
            for piece in joined_pieces(data):
                sink.write(piece)
            sink.close()
            with nullcontext() if expected is None else locked(self._path):
                if expected is not None and not self.version(name).is_same(expected):
                    raise FileChanged(name)
                if check is not None:
                    check()
                os.replace(self._path / temporary, self._path / name)
        except BaseException:
            sink.abandon()
            raise
        self.flush()

    def append(self, name: str, line: bytes) -> None:
        with open(self._path / name, "a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the previous line was cut off
                    line = b"\n" + line
            file.write(line + b"\n")

    def flush(self) -> None:
        self._sync_folder(self._path)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(self._path / name)

    def abort_uploads(self, matches: Callable[[str], bool]) -> None:
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
                require_inside(name)
                with self._opened(name) as file:
                    empty = not os.fstat(file.fileno()).st_size
                    # Copy-on-write: a program may write to tensors over the map, and the file must not change.
                    self._maps[name] = None if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return self._maps[name]

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for reading. Pipes, sockets and devices are refused, without waiting for them."""
        path = self._path / name
        with _missing_if_impossible(name), open(path, "rb", opener=_open_without_waiting) as file:  # refuses folders
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise NotAFile(errno.EINVAL, "this is a pipe, a socket or a device, not a file", str(path))
            yield file

    def _sync_folder(self, path: Path) -> None:
        if self._sync:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _pieces(file: BinaryIO) -> Iterator[memoryview]:
    """Yield the bytes of a file in one buffer, which holds one piece at a time."""
    buffer = memoryview(bytearray(_PIECE))
    while size := file.readinto(buffer):  # type: ignore[attr-defined]
        yield buffer[:size]


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@contextmanager
def _skip_dead_links() -> Iterator[None]:
    """Ignore an entry of a folder that is a dead link: to nothing, to itself, or to a folder without access."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            raise


@contextmanager
def _missing_if_impossible(name: str) -> Iterator[None]:
    """Raise ``FileNotFoundError`` for a name that the file system cannot have, and for a link to itself."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise impossible_name(name) from error
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise impossible_name(name) from error
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise NotAFile(error.errno, "this is a socket or a device, not a file", name) from error
        raise


class _LocalSink(Sink):
    """A local file being written.

    Args:
        path: the file, which must not exist.
        sync: fsync the file when it is closed.
    """

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
        if not self._owner.is_here:  # in a forked child: the save goes on in the parent
            return
        with suppress(OSError):  # if the file stays, the next save removes it
            os.unlink(self._path)

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._file)

"""The folder or file that an export makes: nothing looks like a model until everything is written.

On a local disk, all files are written into a part folder. If the target does not exist, the commit renames the part
folder, so that everything appears in one step. If it exists, the commit moves the files one by one, and the file that
makes the folder a model comes last: the index, or the only file of weights. Files that an export would replace are an
error before anything is written; only an export to a single file replaces that file, in one step. In other stores each
put is atomic, and the same file comes last.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from torch_xla_ckpt.errors import CheckpointError, ConcurrentSaveError
from torch_xla_ckpt.exchange.layout import Layout, OutFile
from torch_xla_ckpt.formats import is_weights
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import Location, open_folder

logger = logging.getLogger(__name__)

_PART = re.compile(r"\..*\.export-[0-9a-f]{8}\.part")
_SHOWN = 5  # names that an error lists


def require_free(location: Location, layout: Layout, companions: Iterable[str], *, is_file: bool) -> None:
    """Check that an export would replace nothing.

    Raises:
        CheckpointError: the folder has files that the export would write, or weights that readers would prefer.
    """
    if is_file:
        if open_folder(location.parent).is_file(location.name) or not open_folder(location).names():
            return
        raise CheckpointError(f"{location} is a folder, and the export writes one file. Nothing was written")
    if not location.is_object_store and open_folder(location.parent).is_file(location.name):
        raise CheckpointError(f"{location} is a file, and the export writes a folder. Nothing was written")
    new = {file.name for file in layout.files} | set(companions) | ({layout.last[0]} if layout.last else set())
    there = sorted(
        name for name in open_folder(location).names() if name in new or is_weights(name) or name == METADATA
    )
    if there:
        more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
        raise CheckpointError(
            f"{location} already has {', '.join(there[:_SHOWN])}{more}. Nothing was written. An export never replaces "
            "a model: pass another path, or remove the old files"
        )


class LocalTarget:
    """A model being written to a local disk. Made by one rank; every rank writes through ``path``.

    Args:
        location: the folder, or the file, to make.
        is_file: whether the export is one file.
    """

    def __init__(self, location: Location, *, is_file: bool):
        self._target = Path(location.path)
        self._is_file = is_file
        self._is_new = not self._target.exists()
        parent = self._target if not self._is_new and not is_file else self._target.parent
        parent.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers(parent)
        self.parts = parent / f".{self._target.name}.export-{secrets.token_hex(4)}.part"
        self.parts.mkdir()
        self._lock = _locked(self.parts)

    def make(self, file: OutFile) -> None:
        """Create a file at its full size, with everything but the tensors."""
        with open(self.parts / file.name, "xb") as out:
            out.truncate(file.size)
            for start, data in file.pieces:
                out.seek(start)
                out.write(data)
            out.flush()
            os.fsync(out.fileno())

    def commit(self, layout: Layout, companions: Mapping[str, bytes]) -> None:
        """Make everything visible.

        Raises:
            ConcurrentSaveError: another program has written to the same path meanwhile.
        """
        small = dict(companions) | ({layout.last[0]: layout.last[1]} if layout.last else {})
        for name, data in small.items():
            (self.parts / name).write_bytes(data)
            _sync(self.parts / name)
        weights = [file.name for file in layout.files]
        _sync(self.parts)
        try:
            if self._is_file:
                os.replace(self.parts / weights[0], self._target)
            elif self._is_new:
                os.rename(self.parts, self._target)
            else:
                self._move([*companions, *weights, *([layout.last[0]] if layout.last else [])])
        except OSError as error:
            if error.errno in _MEANWHILE:
                raise ConcurrentSaveError(
                    f"another program has written to {self._target} during this export, or has removed its files. "
                    "Look at what is there, and export to another path"
                ) from error
            raise
        _sync(self._target.parent)
        self.abandon()

    def abandon(self) -> None:
        """Remove everything that is not visible."""
        shutil.rmtree(self.parts, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _move(self, names: Sequence[str]) -> None:
        """Move files into the folder, in order, without replacing any."""
        moved: list[str] = []
        try:
            for name in names:
                _move_new(self.parts / name, self._target / name)
                moved.append(name)
            _sync(self._target)
        except BaseException:
            for name in moved:
                with suppress(OSError):
                    os.unlink(self._target / name)
            raise

    def _remove_leftovers(self, parent: Path) -> None:
        """Remove part folders of exports to the same target whose programs have died."""
        for name in os.listdir(parent):
            if not (_PART.fullmatch(name) and name.startswith(f".{self._target.name}.export-")):
                continue
            with suppress(OSError):
                lock = _locked(parent / name)
                if lock is not None:
                    shutil.rmtree(parent / name, ignore_errors=True)
                    os.close(lock)


class RemoteTarget:
    """A model being written to a store that fsspec reaches: whole files, each visible when it is complete.

    Args:
        location: the folder, or the file, to make.
        is_file: whether the export is one file.
    """

    def __init__(self, location: Location, *, is_file: bool):
        self._is_file = is_file
        self.folder = open_folder(location.parent if is_file else location)
        self.folder.make()

    def commit(self, layout: Layout, companions: Mapping[str, bytes]) -> None:
        """Write the small files; the index comes last."""
        for name, data in companions.items():
            self.folder.put(name, data)
        if layout.last is not None:
            self.folder.put(*layout.last)

    def withdraw(self, layout: Layout, companions: Iterable[str]) -> None:
        """Remove the files of a failed export. A single file is only put when it is whole, and may be an older one."""
        if self._is_file:
            return
        with suppress(Exception):  # an error here would hide the error of the export
            self.folder.remove(
                [*([layout.last[0]] if layout.last else []), *(f.name for f in layout.files), *companions]
            )


# Errors of a rename if the target has appeared, or the part folder has gone.
_MEANWHILE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT)


def _move_new(source: Path, target: Path) -> None:
    """Move a file. A link never replaces a file; where there are no links, look first."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if target.exists():
            raise FileExistsError(f"{target} exists") from None
        os.rename(source, target)


def _locked(folder: Path) -> int | None:
    """Lock a folder until this process ends. Return the descriptor; None if another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

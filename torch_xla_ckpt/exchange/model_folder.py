"""The folder or file that an export makes: nothing looks like a model until everything is written.

On a local disk, all files are written into a part folder. If the target does not exist, the commit renames the part
folder, so that everything appears in one step. If it exists, the commit links the files into it one by one, and the
file that makes the folder a model comes last: the index, or the only file of weights. Files that an export would
replace are an error before anything is written; only an export to a single file replaces that file, in one step. In
other stores each put is atomic, and the same file comes last.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from torch_xla_ckpt.errors import ConcurrentSaveError
from torch_xla_ckpt.exchange import part_folder
from torch_xla_ckpt.exchange.claim import StoreClaim
from torch_xla_ckpt.exchange.free_path import require_free
from torch_xla_ckpt.exchange.layout import Layout
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.storage import Location, open_folder

# Errors of a rename or a link if the target has appeared meanwhile, or the part folder has gone.
_MEANWHILE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT, errno.ENOTDIR)


class Target(Protocol):
    """A model being written. The first rank of an export has it.

    Attributes:
        parts: the folder that all ranks write local files to; None for other stores.
    """

    parts: Path | None

    def require_free(self) -> None:
        """Check that the path is free. Changes nothing.

        Raises:
            CheckpointError: as ``begin``.
        """

    def begin(self) -> None:
        """Check that the path is free, and create what all ranks write to.

        Raises:
            CheckpointError: the export would replace files, or the folder has weights that readers would prefer.
        """

    def commit(self) -> None:
        """Make everything visible.

        Raises:
            ConcurrentSaveError: another program has written to the same path meanwhile.
        """

    def abandon(self) -> None:
        """Remove everything that the export has written."""


def target_of(location: Location, layout: Layout, companions: Mapping[str, bytes], *, is_file: bool) -> Target:
    """Return the target of an export.

    Args:
        location: the folder, or the file, to make.
        layout: the files with tensors.
        companions: bytes of the files beside them, by name.
        is_file: whether the export is one file.
    """
    if location.is_local:
        return _LocalTarget(location, layout, companions, is_file)
    return _RemoteTarget(location, layout, companions, is_file)


def remote_folder(location: Location, *, is_file: bool) -> Folder:
    """Return the folder in a store to which an export writes its files."""
    return open_folder(location.parent if is_file else location)


class _LocalTarget(Target):
    """A model being written to a local disk; see ``target_of``."""

    def __init__(self, location: Location, layout: Layout, companions: Mapping[str, bytes], is_file: bool):
        self._location = location
        self._layout = layout
        self._small = dict(companions) | ({layout.last[0]: layout.last[1]} if layout.last else {})
        self._is_file = is_file
        self._path = Path(location.path)
        self.parts: Path | None = None
        self._lock: int | None = None

    def require_free(self) -> None:
        names = {*self._small, *(file.name for file in self._layout.files)}
        require_free(self._location, names, is_file=self._is_file)

    def begin(self) -> None:
        self._is_new = not os.path.lexists(self._path)
        parent = self._path.parent if self._is_new or self._is_file else self._path
        part_folder.remove_leftovers(parent, self._path)
        self.require_free()
        parent.mkdir(parents=True, exist_ok=True)
        self.parts, self._lock = part_folder.create(parent, self._path)
        for out in self._layout.files:
            with open(self.parts / out.name, "xb") as file:
                file.truncate(out.size)
                for start, data in out.pieces:
                    file.seek(start)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def commit(self) -> None:
        assert self.parts is not None
        for name, data in self._small.items():
            (self.parts / name).write_bytes(data)
            _sync(self.parts / name)
        weights = [file.name for file in self._layout.files]
        _sync(self.parts)
        try:
            if self._is_file:
                os.replace(self.parts / weights[0], self._path)
            elif self._is_new:
                os.rename(self.parts, self._path)
            else:
                last = [self._layout.last[0]] if self._layout.last else []
                self._move([*(name for name in self._small if name not in last), *weights, *last])
        except OSError as error:
            if error.errno in _MEANWHILE:
                raise ConcurrentSaveError(
                    f"another program has written to {self._path} during this export, or has removed its files. "
                    "Look at what is there, and export to another path"
                ) from error
            raise
        _sync(self._path.parent)
        self.abandon()

    def abandon(self) -> None:
        if self.parts is not None:
            shutil.rmtree(self.parts, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _move(self, names: Sequence[str]) -> None:
        """Move files into the folder, in order, without replacing any."""
        assert self.parts is not None
        moved: list[str] = []
        try:
            for name in names:
                _move_new(self.parts / name, self._path / name)
                moved.append(name)
            _sync(self._path)
        except BaseException:
            for name in moved:
                with suppress(OSError):
                    os.unlink(self._path / name)
            raise


class _RemoteTarget(Target):
    """A model being written to a store that fsspec reaches: whole files, each visible when it is complete.

    See ``target_of`` for the arguments.
    """

    parts: Path | None = None

    def __init__(self, location: Location, layout: Layout, companions: Mapping[str, bytes], is_file: bool):
        self._location = location
        self._layout = layout
        self._companions = companions
        self._is_file = is_file
        self._folder = remote_folder(location, is_file=is_file)
        self._claim = StoreClaim(self._folder)
        self._has_begun = False

    def require_free(self) -> None:
        require_free(self._location, self._names(), is_file=self._is_file)

    def begin(self) -> None:
        if self._is_file:  # one put, which needs no claim
            self.require_free()
            return
        if not self._claim.is_there():
            self.require_free()
        self._folder.make()
        self._claim.take()
        self.require_free()
        names = self._names()
        self._claim.announce(names, names[-1])
        self._has_begun = True
        for name, data in self._companions.items():
            self._folder.put(name, data)

    def commit(self) -> None:
        if self._has_begun:
            self._claim.require()
        if self._layout.last is not None:
            self._folder.put(*self._layout.last)
        self._claim.release()

    def abandon(self) -> None:
        with suppress(Exception):  # an error here would hide the error of the export
            # Files of another export stay, and so does an older file where this export writes a single file.
            if self._has_begun and self._claim.is_held:
                self._folder.remove(self._names()[::-1])
            self._claim.release()

    def _names(self) -> list[str]:
        """Return the names of all files, in the order in which they are written."""
        last = [self._layout.last[0]] if self._layout.last else []
        return [*self._companions, *(file.name for file in self._layout.files), *last]


def _move_new(source: Path, target: Path) -> None:
    """Move a file. A link never replaces a file; where there are no links, look first."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if target.exists():
            raise FileExistsError(errno.EEXIST, "the file exists", str(target)) from None
        os.rename(source, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

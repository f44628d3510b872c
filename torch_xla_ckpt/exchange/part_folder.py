"""The hidden folder that a local export writes to, which its program locks as long as it lives."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from torch_xla_ckpt.storage import checksum

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NAME = re.compile(r"\.(.*)\.export-[0-9a-f]{8}\.part", re.DOTALL)
_LONGEST = 200  # bytes of a name that leave room for the rest of a part folder's name: most file systems allow 255


def create(parent: Path, target: Path) -> tuple[Path, int | None]:
    """Create and lock a part folder.

    Args:
        parent: where to create the part folder.
        target: the folder or file to make.

    Returns:
        The part folder, and the descriptor that holds the lock until it is closed; None if there are no locks.
    """
    while True:
        folder = parent / f".{_label(target)}.export-{secrets.token_hex(4)}.part"
        folder.mkdir()
        try:
            lock = _locked(folder)
        except OSError:  # the file system has no locks; then leftovers stay
            return folder, None
        if lock is not None and _is_there(folder, lock):
            return folder, lock
        # Another program has taken the folder for a leftover, in the moment before it was locked.
        if lock is not None:
            os.close(lock)


def remove_leftovers(parent: Path, target: Path) -> None:
    """Remove what killed exports to the same target have left: part folders, and files that they had moved already."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(parent):
            found = _NAME.fullmatch(name)
            if found is None or found[1] != _label(target):
                continue
            with suppress(OSError):
                lock = _locked(parent / name)
                if lock is not None:
                    _undo_move(parent / name, target)
                    shutil.rmtree(parent / name, ignore_errors=True)
                    os.close(lock)


def _label(target: Path) -> str:
    """Return the target's name, or a hash of it where the name of a part folder would be too long for the system."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= _LONGEST else checksum(name).hex()


def _undo_move(part: Path, target: Path) -> None:
    """Remove files that a killed export has linked into its target, unless it has linked all of them."""
    names = os.listdir(part)
    moved = [name for name in names if _is_same_file(part / name, target / name)]
    if len(moved) < len(names):
        for name in moved:
            os.unlink(target / name)


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except OSError:
        return False


def _is_there(folder: Path, descriptor: int) -> bool:
    """Whether a folder still has its name."""
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _locked(folder: Path) -> int | None:
    """Lock a folder until this process ends. Return the descriptor; None if another program has locked or removed it.

    Where the system has no locks, the folder counts as locked by this program.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor

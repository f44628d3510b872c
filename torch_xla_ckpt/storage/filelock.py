"""A lock on a local folder, held by the one program that commits a save there.

The kernel drops the lock when its process ends, so no lock is ever left behind.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where checkpoints are only read
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK_NAME = "commit.lock"
"""The file that is locked where the folder itself cannot be locked."""

_TIMEOUT = 60.0  # seconds; the lock is held for one rename
_PAUSE = 0.01  # seconds between two attempts
# Errors of file systems that cannot lock a folder.
_UNSUPPORTED = frozenset((errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EISDIR))
_warned = threading.Event()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder.

    On a file system without locks, log one warning and lock nothing.

    Raises:
        TimeoutError: another program holds the lock for a minute.
    """
    if fcntl is None:
        yield
        return
    descriptor = _acquire(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also unlocks copies of the descriptor in forked children
            os.close(descriptor)


def _acquire(folder: Path) -> int | None:
    """Return the descriptor that holds the lock; None on a file system without locks."""
    # Some network file systems only lock files that are open for writing.
    for path, flags in ((folder, os.O_RDONLY), (folder / LOCK_NAME, os.O_RDWR | os.O_CREAT)):
        descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            _wait_for(descriptor, folder)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _UNSUPPORTED:
                raise
            problem = error
        except BaseException:
            os.close(descriptor)
            raise
        else:
            return descriptor
    if not _warned.is_set():
        _warned.set()
        logger.warning(
            "%s is on a file system without locks (%s), so two programs that save there at the same time may both "
            "succeed. Let only one program save to a path",
            folder,
            problem,
        )
    return None


def _wait_for(descriptor: int, folder: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                raise
        if time.monotonic() > deadline:
            raise TimeoutError(f"another program has held the lock of {folder} for {_TIMEOUT:.0f} s")
        time.sleep(_PAUSE)

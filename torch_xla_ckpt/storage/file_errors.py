"""Errors of local and remote folders, and texts that several modules report about files."""

from __future__ import annotations

import errno

TRANSIT = (
    "%s once gave a wrong answer (%s). The same request, made a second time, returned what was saved, so the "
    "checkpoint is not damaged. If this happens again, check the network and the store"
)
"""Warning about an answer of a store that was garbled on its way. Takes the folder's URL and the problem."""

NOT_A_FILE = "there is a folder, a pipe, a socket or a device in the place of the file"
"""Description of the damage when a file's name belongs to something else."""


class NotAFile(OSError):
    """A pipe, a socket or a device has the name of a file."""


class FileChanged(Exception):
    """A file that a save would replace is not the expected version."""


def impossible_name(name: str) -> FileNotFoundError:
    """Return the error about a file whose name the file system cannot have."""
    return FileNotFoundError(errno.ENOENT, "no file can have this name", name)

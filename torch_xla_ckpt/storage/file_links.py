"""Symbolic links in the place of a file that is to be written."""

from __future__ import annotations

import os
from dataclasses import replace

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.storage.location import Location


def followed(file: Location) -> Location:
    """Return the file that a program which opens ``file`` would write: links at the end of the path are followed.

    ``cp``, ``open(..., "w")`` and ``torch.save`` write through a link. A program that replaces files by renaming must
    look for the file itself, because a rename replaces the link.

    Args:
        file: the path of a file, which need not exist.

    Returns:
        ``file`` itself, unless it is a link on a local disk.

    Raises:
        CheckpointError: the link leads to itself, or to a folder that does not exist.
    """
    if not file.is_local or not os.path.islink(file.path):
        return file
    real = os.path.realpath(file.path)
    if os.path.islink(real):
        raise CheckpointError(f"{file} is a link that leads to itself. Nothing was written. Remove the link")
    if not os.path.isdir(os.path.dirname(real)):
        raise CheckpointError(
            f"{file} is a link to {real}, whose folder does not exist. Nothing was written. Create that folder, or "
            "remove the link"
        )
    return replace(file, url=real, path=real)

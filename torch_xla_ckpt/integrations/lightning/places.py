"""Places of checkpoints: where a save writes, when the checkpoint gets its name, and how it is removed."""

from __future__ import annotations

import os
from contextlib import suppress

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import Location, holds_checkpoint, is_checkpoint_file, is_file, open_folder

LIGHTNINGS_FILE = "meta.pt"
"""The file beside DCP's in sharded checkpoints of Lightning's own strategies."""

_SLURM = "hpc_ckpt_"
_RESUMED_BY_NAME = ("last", _SLURM)
"""How the names begin that ``ckpt_path="last"`` and SLURM's restart look for."""


def prepare(where: Location, *, full: bool) -> bool:
    """Make sure that a checkpoint can be written, without harm to what is there.

    Returns:
        Whether the checkpoint is to be written to ``unfinished(where)``, and gets its name only when it is whole. This
        holds for single files, and for new checkpoints that a restart would find by their names.

    Raises:
        CheckpointError: a file is where a folder is to be written, or the reverse.
    """
    if where.is_local and os.path.islink(where.path):
        os.unlink(where.path)  # else the save would replace the checkpoint that the link leads to
    is_there = is_file(where)
    if not full and is_there:
        raise CheckpointError(
            f'{where} is a file, and state_dict_type="sharded" saves a folder. Nothing was saved. Remove the file, or '
            "choose another path"
        )
    if full and not is_there and open_folder(where).names():
        raise CheckpointError(
            f'{where} is a folder, and state_dict_type="full" saves a file. Nothing was saved. Remove the folder, or '
            "choose another path"
        )
    is_new = where.is_local and not os.path.lexists(where.path)
    is_named_later = full or (is_new and where.name.startswith(_RESUMED_BY_NAME))
    # ModelCheckpoint asks which names are taken, and makes links in the folder above.
    open_folder(unfinished(where) if is_named_later else where).make()
    return is_named_later


def unfinished(where: Location) -> Location:
    """Return the folder beside a checkpoint in which the checkpoint is written before it gets its name.

    Lightning takes the folder for no checkpoint: SLURM's restart looks for names with "hpc_ckpt_" anywhere in them.
    """
    return where.parent.child(f".{where.name.replace(_SLURM, 'hpc-ckpt-')}.unfinished")


def give_name(where: Location) -> None:
    """Give a checkpoint that is whole its name.

    Raises:
        OSError: something else has taken the name.
    """
    os.rename(unfinished(where).path, where.path)
    open_folder(where.parent).flush()


def remove(where: Location) -> None:
    """Remove a checkpoint: a link, a file, or the files of a checkpoint in a folder. Other files stay.

    Raises:
        OSError: the storage refused.
    """
    if where.filesystem is None and os.path.islink(where.path):
        os.unlink(where.path)
    elif is_file(where):
        os.unlink(where.path) if where.filesystem is None else where.filesystem.rm_file(where.path)
    else:
        folder = open_folder(where)
        names = [name for name in folder.names() if is_checkpoint_file(name) or name in (METADATA, LIGHTNINGS_FILE)]
        folder.remove([name for name in names if name == METADATA])  # from here on, nobody takes it for whole
        folder.remove([name for name in names if name != METADATA])
        if where.filesystem is None and os.path.isdir(where.path) and not os.listdir(where.path):
            os.rmdir(where.path)
        elif where.filesystem is not None and not where.is_object_store and not where.filesystem.ls(where.path):
            where.filesystem.rmdir(where.path)


def whole_neighbours(where: Location) -> str:
    """Return, for an error, which whole checkpoints lie beside one that is not whole; the newest local one first."""
    found: list[Location] = []
    with suppress(OSError):
        beside = [where.parent.child(name) for name in open_folder(where.parent).folders() if name != where.name]
        found = [one for one in beside if not one.name.startswith(".") and holds_checkpoint(one)]
        if where.is_local:
            found.sort(key=lambda one: os.stat(os.path.join(one.path, METADATA)).st_mtime, reverse=True)
    return f"Whole checkpoints beside it: {', '.join(one.name for one in found[:5])}" if found else ""

"""The error for a folder without a checkpoint. The folder of a run gets its steps named."""

from __future__ import annotations

import re
from contextlib import suppress

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.serialization import METADATA

_STEP = re.compile(r"0|[1-9][0-9]*")
# Folders of a long run in which a checkpoint is looked for: its oldest and its newest ones.
_OLDEST, _NEWEST = 5, 15
_SHOWN = 3  # steps named from each end


def no_checkpoint(folder: Folder, lacking: str = f"no {METADATA}") -> CheckpointError:
    """Return the error that says why a folder holds no checkpoint, and which path or call to use.

    Args:
        folder: the folder.
        lacking: what the folder has instead of a checkpoint, such as "no .metadata".
    """
    steps = steps_of_run(folder)
    if not steps:
        return CheckpointError(
            f"there is no checkpoint in {folder.url}: it has {lacking}. Check the path. An interrupted save leaves no "
            "checkpoint"
        )
    named = [str(step) for step in steps]
    if len(named) > 2 * _SHOWN:
        named[_SHOWN:-_SHOWN] = ["..."]
    return CheckpointError(
        f"there is no checkpoint in {folder.url}: it is the folder of a run and holds the steps {', '.join(named)}. "
        f"To read one step, pass its path, such as {folder.url.rstrip('/')}/{steps[-1]}. To restore the newest step "
        f"that is whole, call CheckpointManager({folder.url!r}).restore_latest(...)"
    )


def steps_of_run(folder: Folder) -> list[int]:
    """Return the steps of a run that hold a checkpoint, ascending; of a long run only the oldest and the newest ones.

    A folder that is no run, or that cannot be listed, has none.
    """
    with suppress(OSError, CheckpointError):
        return _steps(folder)
    return []


def _steps(folder: Folder) -> list[int]:
    numbers = sorted(int(name) for name in folder.folders() if _STEP.fullmatch(name))
    if len(numbers) > _OLDEST + _NEWEST:
        numbers = [*numbers[:_OLDEST], *numbers[-_NEWEST:]]
    return [number for number in numbers if _has_checkpoint(folder, number)]


def _has_checkpoint(folder: Folder, step: int) -> bool:
    try:
        folder.size(f"{step}/{METADATA}")
    except OSError:
        return False
    return True

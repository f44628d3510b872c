"""Checks that an export replaces nothing: neither its source, nor another model, nor a part of a checkpoint or run."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.formats import is_weights
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import Location, open_folder, steps_of_run

_SHOWN = 5  # names that an error lists
_REMEDY = "Nothing was written. Export to another path"


def require_apart(source: Location, target: Location) -> None:
    """Check that an export does not write to its own source.

    Args:
        source: the checkpoint to export: a folder or a file.
        target: the folder or file to make. A file is no link any more; see ``followed``.

    Raises:
        CheckpointError: the target is the source, or lies inside of the source's folder.
    """
    if source.is_local != target.is_local:
        return
    if target.is_local:
        is_inside, is_same = _is_inside(Path(target.path), Path(source.path))
    else:
        is_same = target.identity.rstrip("/") == source.identity.rstrip("/")
        is_inside = target.identity.startswith(source.identity.rstrip("/") + "/")
    if is_same:
        raise CheckpointError(f"the export would replace its own source, {source}. {_REMEDY}")
    if is_inside:
        raise CheckpointError(f"{target} lies inside of the source {source}, whose files must stay. {_REMEDY}")


def require_free(target: Location, names: Collection[str], *, is_file: bool) -> None:
    """Check that an export to a path replaces no model, and damages no checkpoint and no run.

    Args:
        target: the folder or file to make.
        names: the names of all files of the export.
        is_file: whether the export is one file.

    Raises:
        CheckpointError: the path is not free.
    """
    if is_file:
        _require_free_file(target)
    else:
        _require_free_folder(target, names)


def _require_free_file(target: Location) -> None:
    parent = open_folder(target.parent)
    if parent.is_file(METADATA):
        raise CheckpointError(f"{target} would be a file inside of the checkpoint {parent.url}. {_REMEDY}")
    if is_weights(target.name):
        _require_no_run(target.parent)
    is_folder = os.path.isdir(target.path) if target.is_local else bool(open_folder(target).names())
    if not parent.is_file(target.name) and is_folder:
        raise CheckpointError(f"{target} is a folder, and the export writes one file. Nothing was written")


def _require_free_folder(target: Location, names: Collection[str]) -> None:
    if not target.is_object_store and open_folder(target.parent).is_file(target.name):
        raise CheckpointError(f"{target} is a file, and the export writes a folder. Nothing was written")
    if target.is_local and os.path.islink(target.path) and not os.path.exists(target.path):
        raise CheckpointError(
            f"{target} is a link to {os.readlink(target.path)}, which does not exist. Nothing was written. Create "
            "that folder, or remove the link"
        )
    there = sorted(
        name for name in open_folder(target).names() if name in names or is_weights(name) or name == METADATA
    )
    if there:
        more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
        raise CheckpointError(
            f"{target} already has {', '.join(there[:_SHOWN])}{more}. Nothing was written. An export never replaces "
            "a model: pass another path, or remove the old files"
        )
    _require_no_run(target)


def _require_no_run(folder: Location) -> None:
    steps = steps_of_run(open_folder(folder))
    if steps:
        raise CheckpointError(
            f"{folder} is the folder of a run and holds the steps {', '.join(map(str, steps[:_SHOWN]))}"
            f"{', ...' if len(steps) > _SHOWN else ''}. A model there would hide them. {_REMEDY}"
        )


def _is_inside(target: Path, source: Path) -> tuple[bool, bool]:
    """Return whether a local target lies inside of the source's folder, and whether it is the source itself."""
    try:
        wanted = os.stat(source)
    except OSError:
        return False, False
    return any(_is(folder, wanted) for folder in _parents(target)), _is(target, wanted)


def _parents(path: Path) -> list[Path]:
    """Return the folders that a path leads through, with links followed."""
    real = Path(os.path.realpath(path if path.is_dir() else path.parent))
    return [real, *real.parents] if not path.is_dir() else list(real.parents)


def _is(path: Path, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), wanted)
    except OSError:
        return False

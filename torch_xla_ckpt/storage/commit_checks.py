"""The last checks before a commit: all files of the save are there, and no other save has committed since it began."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch_xla_ckpt.errors import CheckpointError, ConcurrentSaveError
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage.checkpoint_index import read_index
from torch_xla_ckpt.storage.file_names import metadata_name, rank_of_metadata, ranks_metadata
from torch_xla_ckpt.storage.manifest import Manifest
from torch_xla_ckpt.storage.save_start import SaveStart


def require_files(
    folder: Folder, files: Mapping[str, int], listed: Collection[str], start: SaveStart, rank: int | None
) -> None:
    """Check that this process sees all files of a save: files of other processes, and files that somebody may remove.

    Raises:
        ConcurrentSaveError: another program has committed here since, and may have removed files.
        CheckpointError: some files are missing, so nobody could load the checkpoint.
    """
    missing = folder.missing(files, listed)
    if not missing:
        return
    if not folder.version(metadata_name(rank)).is_same(start.version):
        raise lost_to_another(folder, rank)
    raise CheckpointError(
        f"the checkpoint was not committed: {', '.join(missing[:5])} cannot be seen whole by the coordinator in "
        f"{folder.url}. All processes must write to one shared folder. If this is one, its file system shows new files "
        "late, or somebody removed them during the save. Save again"
    )


def require_no_other_save(folder: Folder, listed: Collection[str], start: SaveStart, rank: int | None) -> None:
    """Check that saves of all ranks and saves without collectives do not overlap in one folder.

    Raises:
        ConcurrentSaveError: the other kind of save has committed here; the error names that save.
    """
    if rank is not None:
        if folder.version(METADATA).exists:
            raise lost_to_another(folder, None)
        return
    ranks_own = start.survey.result().ranks_own
    for name in sorted(ranks_metadata(listed)):
        before = ranks_own.get(name)
        if before is None or not folder.version(name).is_same(before):
            raise lost_to_another(folder, rank_of_metadata(name))


def lost_to_another(folder: Folder, rank: int | None) -> ConcurrentSaveError:
    """Return the error that names the save which committed first."""
    try:
        manifest = read_index(folder, rank).manifest
        other = "another program's save" if manifest is None else _describe(manifest)
    except FileNotFoundError:
        other = f"another program, which removed {metadata_name(rank)}"
    except CheckpointError:
        other = "another program's save, which cannot be read"
    return ConcurrentSaveError(
        f"{folder.url} was changed while this save ran, by {other}. This save was not committed, and the other one is "
        "untouched. Let only one program at a time save to a path. If the other one is an old job that has not ended, "
        "end it, and save again"
    )


def _describe(manifest: Manifest) -> str:
    step = "" if manifest.step is None else f" of step {manifest.step}"
    writer = f" by {manifest.writer}" if manifest.writer else ""
    return f"save {manifest.save_id}{step}{writer}, committed at {manifest.time}"

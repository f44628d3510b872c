"""A save that is about to be committed, and the last checks: its files are there, and no other save has committed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch_xla_ckpt.errors import CheckpointError, ConcurrentSaveError
from torch_xla_ckpt.protocols import Entry, Folder
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage.checkpoint_index import read_index
from torch_xla_ckpt.storage.file_names import (
    manifest_name,
    metadata_name,
    rank_of_metadata,
    ranks_metadata,
    temporary_name,
)
from torch_xla_ckpt.storage.manifest import Manifest
from torch_xla_ckpt.storage.save_start import SaveStart


@dataclass(frozen=True)
class Candidate:
    """A save that is about to be committed.

    Args:
        folder: the checkpoint's folder.
        save_id: the id of the save.
        files: the size in bytes of each data file, by name.
        start: the state of the folder when the save began.
        rank: the rank of a save without collectives. Default: a save of all ranks.
    """

    folder: Folder
    save_id: str
    files: Mapping[str, int]
    start: SaveStart
    rank: int | None = None

    @property
    def metadata(self) -> str:
        """The name of the file that makes the checkpoint visible."""
        return metadata_name(self.rank)

    @property
    def temporary(self) -> str:
        """The name of the temporary file that becomes ``metadata`` on a local disk."""
        return temporary_name(self.rank, self.save_id)

    @property
    def manifest(self) -> str:
        """The name of the manifest."""
        return manifest_name(self.save_id)

    def require_files(self, listed: Collection[str], manifest_bytes: int | None) -> None:
        """Check that this process sees all files: those of other processes, and files that somebody may remove.

        Args:
            listed: the names of the files in the folder, or the folder's listing.
            manifest_bytes: the size of the manifest; None to leave it out.

        Raises:
            ConcurrentSaveError: another program has committed here since, and may have removed files.
            CheckpointError: some files are missing, so nobody could load the checkpoint.
        """
        files = self.files if manifest_bytes is None else {**self.files, self.manifest: manifest_bytes}
        missing = self.folder.missing(files, listed)
        if not missing:
            return
        if not self.folder.version(self.metadata).is_same(self.start.version):
            raise self.lost_to_another(self.rank)
        sizes: Mapping[str, Entry] = listed if isinstance(listed, Mapping) else {}
        cut = [f"{sizes[name].size} of {files[name]} bytes of {name}" for name in missing if name in sizes]
        if cut:
            raise CheckpointError(
                f"the checkpoint was not committed: {self.folder.url} has kept only {', '.join(cut[:5])}, although it "
                "called each put a success. The checkpoint before is untouched. Save again"
            )
        raise CheckpointError(
            f"the checkpoint was not committed: {', '.join(missing[:5])} cannot be seen whole by the coordinator in "
            f"{self.folder.url}. All processes must write to one shared folder. If this is one, its file system shows "
            "new files late, or somebody removed them during the save. Save again"
        )

    def require_no_other_save(self, listed: Collection[str]) -> None:
        """Check that saves of all ranks and saves without collectives do not overlap in one folder.

        Args:
            listed: the names of the files in the folder.

        Raises:
            ConcurrentSaveError: the other kind of save has committed here; the error names that save.
        """
        if self.rank is not None:
            if self.folder.version(METADATA).exists:
                raise self.lost_to_another(None)
            return
        ranks_own = self.start.survey.result().ranks_own
        for name in sorted(ranks_metadata(listed)):
            before = ranks_own.get(name)
            if before is None or not self.folder.version(name).is_same(before):
                raise self.lost_to_another(rank_of_metadata(name))

    def lost_to_another(self, rank: int | None) -> ConcurrentSaveError:
        """Return the error that names the save which committed first.

        Args:
            rank: the rank of the other save, if it is one without collectives; None for a save of all ranks.
        """
        try:
            manifest = read_index(self.folder, rank).manifest
            other = "another program's save" if manifest is None else _describe(manifest)
        except FileNotFoundError:
            other = f"another program, which removed {metadata_name(rank)}"
        except CheckpointError:
            other = "another program's save, which cannot be read"
        return ConcurrentSaveError(
            f"{self.folder.url} was changed while this save ran, by {other}. This save was not committed, and the "
            "other one is untouched. Let only one program at a time save to a path. If the other one is an old job "
            "that has not ended, end it, and save again"
        )


def _describe(manifest: Manifest) -> str:
    step = "" if manifest.step is None else f" of step {manifest.step}"
    writer = f" by {manifest.writer}" if manifest.writer else ""
    return f"save {manifest.save_id}{step}{writer}, committed at {manifest.time}"

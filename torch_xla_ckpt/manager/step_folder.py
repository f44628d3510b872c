"""One step's folder: which kind of folder it is, and what its manifest and files say.

The content of ``.metadata`` decides whether a step is committed. A listing never decides it, because listings can lag
behind writes. The content of the files decides whether a step is damaged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch_xla_ckpt.errors import CorruptCheckpointError, UnsafeObjectError
from torch_xla_ckpt.manager.facts import Facts, facts_of
from torch_xla_ckpt.manager.keep import Saved
from torch_xla_ckpt.manager.retries import Retries
from torch_xla_ckpt.protocols import Folder, Window
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import Location, is_checkpoint_file, open_folder, read_index, written_by

TORCH_XLA_MARKER = ".manager_metadata"
"""The file that torch_xla's manager writes last. It is a pickle, and we never open it."""

# The last line of our ``.metadata``: save id, checksum of the manifest, checksum of all bytes before.
_SEAL = re.compile(rb"\ntorch_xla_ckpt ([0-9a-f]{16}) [0-9a-f]{16} [0-9a-f]{16}\n\Z")
_TAIL = 128  # bytes at the end of ``.metadata``, more than the seal has

Kind = Literal["committed", "unfinished", "foreign", "damaged"]


@dataclass(frozen=True)
class StepFolder:
    """The kind of a step's folder.

    Args:
        kind: "committed": the folder holds a checkpoint, written by any program. "unfinished": there is no
            ``.metadata``, because a save is running or broke off, or because the step was deleted. "damaged": our
            writer or torch_xla's manager wrote the folder, and its ``.metadata`` cannot be read. "foreign": there is a
            ``.metadata`` that no checkpoint writer wrote.
        save_id: the id of the save that committed the step; None if another program's writer did.
        flaw: for a damaged step, a description of the damage.
        by_torch_xla: True if torch_xla's manager wrote the step.
    """

    kind: Kind
    save_id: str | None = None
    flaw: str | None = None
    by_torch_xla: bool = False


class StepReader:
    """Reads the folders of a run's steps. Remembers nothing.

    Args:
        location: the run's folder.
        retries: repeats requests that fail.
    """

    def __init__(self, location: Location, retries: Retries):
        self._location = location
        self._retries = retries

    def at(self, step: int) -> Location:
        """Location of a step's folder."""
        return self._location.child(str(step))

    def folder(self, step: int) -> Folder:
        """A step's folder, for reading and deleting."""
        return open_folder(self.at(step), sync=False)

    def stamp(self, step: int) -> object:
        """Return a value that changes with ``.metadata`` on local disks; None on other storage.

        Raises:
            FileNotFoundError: there is no ``.metadata``, on a local disk.
        """
        return self._retries.run(lambda: self._stamp(step), f"looking at step {step}")

    def look(self, step: int) -> StepFolder:
        """Return the kind of a step's folder, from one or two requests."""
        return self._retries.run(lambda: self._look(step), f"looking at step {step}")

    def facts(self, step: int, folder: StepFolder) -> tuple[Facts, str | None]:
        """Read the manifest of a committed step.

        Returns:
            The manifest's facts and its save id. The id is None if the step has no manifest.

        Raises:
            FileNotFoundError: the step was deleted just now.
            CorruptCheckpointError, UnsafeObjectError: the step is damaged.
        """
        if folder.save_id is None:  # stock DCP stores no facts; torch_xla's manager stores them in a pickle
            return Facts(Saved(step), {}, folder.by_torch_xla), None
        manifest = self._retries.run_twice_if_damaged(
            lambda: read_index(self.folder(step)).manifest, f"reading the manifest of step {step}"
        )
        if manifest is None:
            return Facts(Saved(step), {}), None
        return facts_of(step, manifest), manifest.save_id

    def missing(self, step: int, files: Mapping[str, int]) -> list[str]:
        """Return which data files are missing or too short. Asks for each by name, because a listing may lag.

        Args:
            step: the step's number.
            files: the names of the files, with their sizes in bytes.
        """
        folder = self.folder(step)
        absent = self._retries.run(lambda: folder.missing(files), f"listing the files of step {step}")
        return [name for name in absent if self._size(step, name) != files[name]]

    def _stamp(self, step: int) -> object:
        if not self._location.is_local:
            return None
        try:
            status = os.stat(os.path.join(self.at(step).path, METADATA))
        except NotADirectoryError as error:
            raise FileNotFoundError(str(error)) from error
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _look(self, step: int) -> StepFolder:
        folder = self.folder(step)
        try:
            save_id = _sealed_by(folder)
            if save_id is not None:
                return StepFolder("committed", save_id)
            return self._look_without_seal(step, folder)
        except (FileNotFoundError, NotADirectoryError):
            return StepFolder("unfinished")
        except IsADirectoryError:
            return StepFolder("foreign")

    def _look_without_seal(self, step: int, folder: Folder) -> StepFolder:
        """Return the kind of a folder whose ``.metadata`` does not end with our seal."""
        names = folder.names()
        is_checkpoint = TORCH_XLA_MARKER in names or any(is_checkpoint_file(name, stock=False) for name in names)
        try:
            found = self._retries.run_twice_if_damaged(lambda: read_index(folder), f"reading step {step}")
        except (CorruptCheckpointError, UnsafeObjectError) as error:
            return StepFolder("damaged", None, str(error)) if is_checkpoint else StepFolder("foreign")
        if found.manifest is not None:  # a save has replaced .metadata just now
            return StepFolder("committed", found.manifest.save_id)
        if written_by(found.metadata):
            return StepFolder("damaged", None, "its manifest is missing, and the last line of .metadata is damaged")
        return StepFolder("committed", by_torch_xla=TORCH_XLA_MARKER in names)

    def _size(self, step: int, name: str) -> int | None:
        """Size of a step's file in bytes; None if there is no such file."""
        try:
            return self._retries.run(lambda: self.folder(step).size(name), f"looking at {name} in step {step}")
        except FileNotFoundError:
            return None


def _sealed_by(folder: Folder) -> str | None:
    """Return the save id in the seal of ``.metadata``; None if there is no seal. Reads a few bytes.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
    """
    size = folder.size(METADATA)
    start = max(size - _TAIL, 0)
    if not size:
        return None
    (tail,) = folder.view([Window(METADATA, start, size, ((start, size),))])
    match = _SEAL.search(bytes(tail))
    return None if match is None else match[1].decode()

"""Deleting one step: first its commit, then its files. Files that no save of a checkpoint wrote stay."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
from contextlib import suppress

from torch_xla_ckpt.manager.step_folder import TORCH_XLA_MARKER
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import is_checkpoint_file, leftovers


class StepDeletion:
    """Deletes steps of a run.

    Deleting begins with ``retire``, which deletes the commit: from then on there is no such step. ``clear`` deletes
    the files. If the program ends in between, the next one finds the files and removes them with
    ``remove_leftovers``.

    Args:
        steps: the run's steps.
    """

    def __init__(self, steps: Steps):
        self._steps = steps

    def retire(self, step: int) -> None:
        """Delete the commit of a step. Its files stay.

        Raises:
            OSError: the commit is still there.
        """
        self._steps.folder(step).remove([METADATA])
        self._steps.forget(step)
        if self._steps.look(step, fresh=True).kind != "unfinished":
            raise OSError(f"{self._steps.at(step)}/{METADATA} is still there after it was deleted")

    def clear(self, step: int, files: Collection[str] = (), *, stock: bool = False) -> bool:
        """Delete the files of a retired step.

        Files that no checkpoint writer wrote stay, and then the folder stays too. Files of a save that may be running
        stay as well, even if another program runs it.

        Args:
            step: the step's number.
            files: names of files that belong to the step. Others are found by listing the folder.
            stock: True if stock DCP wrote the step: the names of its data files carry no save id.

        Returns:
            True if the folder is gone.

        Raises:
            OSError: some files are still there, or the step is committed again.
        """
        folder = self._steps.folder(step)
        listing = folder.listing()
        ours = leftovers(folder, listing, None) | frozenset(files) | ({TORCH_XLA_MARKER} & listing.keys())
        if stock:
            ours |= {name for name in listing if is_checkpoint_file(name) and not is_checkpoint_file(name, stock=False)}
        # Look only now: a save counts as over when it has ended its lease, and then it has committed the step.
        if self._steps.look(step, fresh=True).kind != "unfinished":
            raise OSError(f"{self._steps.at(step)} is committed again, so its files stay")
        _delete(folder, ours)
        if listing.keys() - ours:
            return False
        self._remove_folder(step)
        self._steps.folder_removed(step)
        return True

    def remove_leftovers(self, step: int) -> bool:
        """Delete what broken-off saves and deletions have left in a folder, if it holds no file of the user's.

        Files of a save that may be running stay, even if another program runs it.

        Returns:
            True if something was deleted.
        """
        folder = self._steps.folder(step)
        names = folder.names()
        if not names or not all(is_checkpoint_file(name, stock=False) for name in names):
            return False
        clock = f"{METADATA}-{secrets.token_hex(8)}.tmp"  # if this file stays, the next program removes it
        folder.put(clock, b"")
        try:
            listing = folder.listing()
        finally:
            folder.remove([clock])
        entry = listing.pop(clock, None)
        over = leftovers(folder, listing, None if entry is None else entry.modified)
        if not over or self._steps.look(step, fresh=True).kind != "unfinished":
            return False
        _delete(folder, over)
        if not listing.keys() - over:
            self._remove_folder(step)
        return True

    def _remove_folder(self, step: int) -> None:
        """Remove an empty folder. Remove only the link where the folder is a link to another one."""
        location = self._steps.at(step)
        if location.filesystem is None:
            with suppress(OSError):  # somebody has put a file into the folder
                if not os.path.islink(location.path):
                    os.rmdir(location.path)
                elif not os.listdir(location.path):
                    os.unlink(location.path)
        elif not location.is_object_store:
            with suppress(Exception):
                location.filesystem.rmdir(location.path)


def _delete(folder: Folder, names: Collection[str]) -> None:
    """Delete files, manifests last: a manifest shows that the other files belong to a save that is over.

    Raises:
        OSError: some files are still there.
    """
    folder.remove(sorted(name for name in names if not name.startswith("manifest-")))
    folder.remove(sorted(name for name in names if name.startswith("manifest-")))

"""Deleting one step: first its commit, then its files. Files that no save of a checkpoint wrote stay."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection
from contextlib import suppress

from torch_xla_ckpt.manager.step_folder import TORCH_XLA_MARKER
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import complete_saves, is_checkpoint_file, leftovers, mark_deleted

logger = logging.getLogger(__name__)


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
        folder = self._steps.folder(step)
        save_id = self._steps.look(step).save_id
        marks: list[str] = []
        if save_id is not None:
            with suppress(FileNotFoundError):  # another program has removed the folder
                marks.append(mark_deleted(folder, save_id))
        try:
            folder.remove([METADATA])
        except Exception:
            with suppress(Exception):
                folder.remove(marks)
            raise
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

        Files of a save that may be running stay, even if another program runs it. All files stay if a committed save
        has lost its ``.metadata`` and nothing else. An error is logged then.

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
        if complete := complete_saves(folder, listing):
            logger.error(
                "%s has lost its %s, and all other files of the committed save %s are there. The step cannot be "
                "restored, and nothing of it is deleted. Put %s back from a copy, or delete the folder yourself",
                self._steps.at(step),
                METADATA,
                complete[0],
                METADATA,
            )
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
    """Delete files: data first, manifests last.

    A lease or the mark of a deletion shows that the save is not whole. A manifest shows that its files are not needed.

    Raises:
        OSError: some files are still there.
    """
    data = {name for name in names if name.endswith(".distcp")}
    manifests = {name for name in names if name.startswith("manifest-")}
    for batch in (data, set(names) - data - manifests, manifests):
        folder.remove(sorted(batch))

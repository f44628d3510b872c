"""The end of a save: remove what the commit has made superfluous, or what a failed save has written."""

from __future__ import annotations

import logging

from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.storage.file_names import carries_any, is_checkpoint_file, metadata_name, save_id_of_lease
from torch_xla_ckpt.storage.save_start import SaveStart
from torch_xla_ckpt.storage.seal import sealed_save_id

logger = logging.getLogger(__name__)


def finish(folder: Folder, start: SaveStart) -> None:
    """Remove the files that a commit has made superfluous.

    The saves that wrote them began with a ``.metadata`` that is replaced now, so they cannot commit any more. Errors
    are only logged, because the new checkpoint is safe.
    """
    start.lease.end()
    try:
        old = start.survey.result().replaced
        folder.remove([*sorted(old), *([] if start.lease.is_removed else [start.lease.name])])
        # The saves whose leases went may have begun uploads as well. Saves that began after this one may be alive.
        dead = {dead_id for name in old if (dead_id := save_id_of_lease(name)) is not None}
        if dead:
            folder.abort_uploads(lambda name: is_checkpoint_file(name, stock=False) and carries_any(name, dead))
    except Exception as error:
        logger.warning(
            "the checkpoint in %s is saved, but files of an older one could not be removed (%s: %s). The next save "
            "tries again",
            folder.url,
            type(error).__name__,
            error,
        )


def withdraw(folder: Folder, save_id: str, start: SaveStart, rank: int | None = None) -> None:
    """Remove the files of a save that failed, unless the save is committed all the same.

    A store may still carry out a put of ``.metadata`` whose answer was lost. Then the files stay until the next save,
    unless another save has committed.
    """
    start.lease.end()
    version = folder.version(metadata_name(rank))
    if sealed_save_id(version.end) == save_id:
        start.lease.remove()
    elif not folder.remote or not start.is_committing or not version.is_same(start.version):
        own = {name for name in folder.names() if save_id in name and is_checkpoint_file(name, stock=False)}
        folder.remove(sorted(own - {start.lease.name}))
        # The lease is removed last: without a lease, a manifest and its data would look like a committed save. For the
        # same reason it stays until the next save if they may still be put.
        if not folder.has_late_puts():
            start.lease.remove()

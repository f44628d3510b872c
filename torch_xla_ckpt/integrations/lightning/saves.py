"""Saves and removals of a training run, in the order in which Lightning asked for them.

With ``background``, a thread waits for the commit of each save and carries out what Lightning wants afterwards. So a
checkpoint is removed only after the saves that Lightning made before are committed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch_xla_ckpt import api
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.integrations.lightning.checkpoint import REST, parent_of, read_rest, state_of
from torch_xla_ckpt.integrations.lightning.consolidate import write_file
from torch_xla_ckpt.integrations.lightning.reading import LIGHTNINGS_FILE, is_file
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.staging import SPMDStager
from torch_xla_ckpt.storage import Location, ShardWriter, is_checkpoint_file, open_folder

logger = logging.getLogger(__name__)

_PENDING = 2
"""Saves that may be under way: ``ModelCheckpoint`` saves twice in a row with ``save_last=True``."""


@dataclass
class _Job:
    """A save or a removal.

    Args:
        where: the checkpoint.
        is_save: whether the job is a save.
        future: resolves when the job is done.
    """

    where: Location
    is_save: bool
    future: Future[None]


class Saves:
    """The saves and removals of a training run.

    Args:
        full: whether to save single files. Default in ``SPMDStrategy``: folders with shards.
    """

    def __init__(self, *, full: bool):
        self._full = full
        self._stager: SPMDStager | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[_Job] = []
        self._last_save_failed = False

    def save(self, checkpoint: dict[str, Any], where: Location, *, background: bool) -> None:
        """Save a checkpoint dict of Lightning.

        Args:
            checkpoint: the dict.
            where: the folder or file to write.
            background: whether to return when the state may change. If False, the save is committed on return.

        Raises:
            CheckpointError: this save failed, or an earlier one in the background.
        """
        self.raise_failed()
        self._cancel_removal(where)
        state = state_of(checkpoint)
        # The random generators and paths of processes differ; those of the first process are saved.
        state[REST] = Processes(None).from_first(lambda: state[REST], f"saving to {where}")
        Processes(None).from_first(lambda: _prepare(where, self._full), f"saving to {where}")
        writer = ShardWriter(_shards_of(where) if self._full else where, step=checkpoint.get("global_step"))
        if not background:
            self.wait()
            api.save(state, storage_writer=writer)
            self._finish(where, state[REST])
            return
        if self._stager is None:
            self._stager = SPMDStager(max_pending=_PENDING)
        handle = api.async_save(state, storage_writer=writer, stager=self._stager)
        rest = state[REST]

        def finish() -> None:
            self._last_save_failed = True
            handle.result()
            self._finish(where, rest)
            self._last_save_failed = False

        self._submit(where, finish, is_save=True)

    def remove(self, where: Location) -> None:
        """Remove a checkpoint, after the saves that were asked for before."""

        def finish() -> None:
            if self._last_save_failed:
                logger.warning("%s is kept, because the save that was to replace it failed", where)
            elif Processes(None).rank == 0:
                remove(where)

        if self._jobs:
            self._submit(where, finish, is_save=False)
        else:
            self._last_save_failed = False
            finish()

    def raise_failed(self) -> None:
        """Raise the error of a save or a removal that has ended.

        Raises:
            CheckpointError: it failed.
        """
        while self._jobs and self._jobs[0].future.done():
            self._end(self._jobs.pop(0))

    def wait(self) -> None:
        """Wait until everything is committed and removed.

        Raises:
            CheckpointError: a save or a removal failed. All others have ended, too.
        """
        errors: list[CheckpointError] = []
        while self._jobs:
            try:
                self._end(self._jobs.pop(0))
            except CheckpointError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Wait until everything is committed and removed, and release threads and memory.

        Raises:
            CheckpointError: a save or a removal failed.
        """
        try:
            self.wait()
        finally:
            stager, self._stager = self._stager, None
            thread, self._thread = self._thread, None
            if thread is not None:
                thread.shutdown()
            if stager is not None:
                stager.close()

    def _submit(self, where: Location, work: Callable[[], None], *, is_save: bool) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch_xla_ckpt_lightning")
        self._jobs.append(_Job(where, is_save, self._thread.submit(work)))

    def _end(self, job: _Job) -> None:
        try:
            job.future.result()
        except CheckpointError:
            raise
        except Exception as error:
            doing = "save to" if job.is_save else "remove"
            raise CheckpointError(f"could not {doing} {job.where} ({type(error).__name__}: {error})") from error

    def _cancel_removal(self, where: Location) -> None:
        """Forget removals of a checkpoint that is about to be saved again."""
        for job in [one for one in self._jobs if not one.is_save and one.where.identity == where.identity]:
            if not job.future.cancel():
                job.future.result()  # it is running
            self._jobs.remove(job)

    def _finish(self, where: Location, rest: bytes) -> None:
        """Write the single file, if that is wanted, from the shards that have been committed.

        Args:
            where: the file.
            rest: what was saved under ``REST``. It never left this process, so that it can be trusted.
        """
        if self._full and Processes(None).rank == 0:
            shards = _shards_of(where)
            write_file(shards, where, read_rest(rest, str(where), trust_pickle=True))
            remove(shards)


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


def _prepare(where: Location, full: bool) -> None:
    """Make sure that a checkpoint can be written, without harm to what is there.

    Raises:
        CheckpointError: a file is where a folder is to be written, or the reverse.
    """
    if where.filesystem is None and os.path.islink(where.path):
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
    if not full:
        open_folder(where).make()  # ModelCheckpoint asks which names are taken


def _shards_of(where: Location) -> Location:
    """Return the folder for the shards from which a single file is written."""
    return parent_of(where).child(f".{where.name}.shards")

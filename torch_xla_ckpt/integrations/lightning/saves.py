"""Saves and removals of a training run, in the order in which Lightning asked for them.

With ``background``, a thread waits for the commit of each save. A checkpoint is removed only after the saves that
Lightning made before are committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch_xla_ckpt import api
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.integrations.lightning.checkpoint import REST, read_rest, state_of
from torch_xla_ckpt.integrations.lightning.consolidate import write_file
from torch_xla_ckpt.integrations.lightning.links import Links
from torch_xla_ckpt.integrations.lightning.places import give_name, prepare, remove, unfinished
from torch_xla_ckpt.staging import SPMDStager
from torch_xla_ckpt.storage import Location, ShardWriter

logger = logging.getLogger(__name__)

_PENDING = 2
"""Saves that may be under way: ``ModelCheckpoint`` saves twice in a row with ``save_last=True``."""


@dataclass(eq=False)
class _Job:
    """A save or a removal.

    Args:
        where: the checkpoint.
        folder: the folder to which the save writes; None for a removal.
        work: what a thread does: it waits for the commit, or removes files.
        future: resolves when the work is done; None until a removal has its turn.
        has_failed: whether the work has failed.
    """

    where: Location
    folder: Location | None
    work: Callable[[], None]
    future: Future[None] | None = None
    has_failed: bool = False

    @property
    def is_save(self) -> bool:
        """Whether the job is a save."""
        return self.folder is not None


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
        self._links = Links()

    def save(self, checkpoint: dict[str, Any], where: Location, *, background: bool) -> None:
        """Save a checkpoint dict of Lightning.

        Args:
            checkpoint: the dict.
            where: the folder or file to write.
            background: whether to return when the state may change. If False, the save is committed on return.

        Raises:
            CheckpointError: this save failed, or an earlier one in the background.
        """
        with Processes(None).agreed(f"saving to {where}"):
            self.raise_failed()
        self._cancel_removal(where)
        if any(job.folder == unfinished(where) for job in self._jobs):
            self.wait()  # two saves must not write to one folder
        state = state_of(checkpoint)
        # The random generators and paths of processes differ; those of the first process are saved.
        state[REST] = Processes(None).from_first(lambda: state[REST], f"saving to {where}")
        is_named_later = Processes(None).from_first(lambda: _prepared(where, self._full), f"saving to {where}")
        folder = unfinished(where) if is_named_later else where
        writer = ShardWriter(folder, step=checkpoint.get("global_step"))
        if not background:
            self.wait()
            api.save(state, storage_writer=writer)
            self._finish(where, folder, state[REST])
            return
        if self._stager is None:
            self._stager = SPMDStager(max_pending=_PENDING)
        handle = api.save_staged(state, writer, self._stager, raises_earlier=False)  # ``_advance`` raises errors
        rest = state[REST]

        def finish() -> None:
            handle.result()
            self._finish(where, folder, rest)

        if Processes(None).rank == 0:
            self._links.begin(where)
        self._jobs.append(_Job(where, folder, finish, self._in_thread(finish)))

    def hold_links(self) -> None:
        """Let links to checkpoints that are being written lead to the checkpoints before, until the saves are done."""
        if self._jobs and Processes(None).rank == 0:
            self._links.hold()

    def remove(self, where: Location) -> None:
        """Remove a checkpoint, after the saves that were asked for before. It stays if the last of them fails."""
        successor = next((job for job in reversed(self._jobs) if job.is_save), None)

        def work() -> None:
            if successor is not None and successor.has_failed:
                logger.warning("%s is kept, because the save that was to replace it failed", where)
            elif Processes(None).rank == 0:
                remove(where)

        self._jobs.append(_Job(where, None, work))
        self._advance(wait=successor is None)

    def raise_failed(self) -> None:
        """Raise the error of a save or a removal that has ended.

        Raises:
            CheckpointError: it failed.
        """
        self._advance(wait=False)

    def wait(self) -> None:
        """Wait until everything is committed and removed.

        Raises:
            CheckpointError: a save or a removal failed. All others have ended, too.
        """
        errors: list[CheckpointError] = []
        while self._jobs:
            try:
                self._advance(wait=True)
            except CheckpointError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self, *, together: bool) -> None:
        """Wait until everything is committed and removed, and release threads and memory.

        Args:
            together: whether all processes call this, so that they wait for each other, and all raise an error of one.

        Raises:
            CheckpointError: a save or a removal failed.
        """
        try:
            with Processes(None, alone=not together).agreed("ending the saves of the run"):
                self.wait()
        finally:
            stager, self._stager = self._stager, None
            thread, self._thread = self._thread, None
            if thread is not None:
                thread.shutdown()
            if stager is not None:
                stager.close()

    def _in_thread(self, work: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch_xla_ckpt_lightning")
        return self._thread.submit(work)

    def _advance(self, *, wait: bool) -> None:
        """End jobs in their order, as far as they are done, or all of them. A removal begins when its turn comes.

        Links change in the program's own thread only, because Lightning changes them there.

        Raises:
            CheckpointError: a job failed. Jobs after it stay.
        """
        while self._jobs:
            job = self._jobs[0]
            if job.future is None:
                job.future = self._in_thread(job.work)
            if not wait and not job.future.done():
                return
            self._jobs.pop(0)
            try:
                job.has_failed = True
                job.future.result()
                job.has_failed = False
            except CheckpointError:
                raise
            except Exception as error:
                doing = "save to" if job.is_save else "remove"
                raise CheckpointError(f"could not {doing} {job.where} ({type(error).__name__}: {error})") from error
            finally:
                if job.is_save and Processes(None).rank == 0:
                    self._links.end(job.where, is_whole=not job.has_failed)

    def _cancel_removal(self, where: Location) -> None:
        """Forget removals of a checkpoint that is about to be saved again."""
        for job in [one for one in self._jobs if not one.is_save and _same_path(one.where, where)]:
            if job.future is not None:
                job.future.result()  # it is running
            self._jobs.remove(job)

    def _finish(self, where: Location, folder: Location, rest: bytes) -> None:
        """Write the single file, if that is wanted, from the shards that have been committed, or name the folder.

        Args:
            where: the checkpoint.
            folder: the folder with the shards.
            rest: what was saved under ``REST``. It never left this process, so that it can be trusted.
        """
        if Processes(None).rank != 0:
            return
        if self._full:
            write_file(folder, where, read_rest(rest, str(where), trust_pickle=True))
            remove(folder)
        elif folder != where:
            give_name(where)


def _prepared(where: Location, full: bool) -> bool:
    """Call ``prepare``, and turn errors of the storage into errors that name the checkpoint."""
    try:
        return prepare(where, full=full)
    except OSError as error:
        raise CheckpointError(
            f"cannot save to {where} ({type(error).__name__}: {error}). Nothing was saved. Choose another path"
        ) from error


def _same_path(one: Location, other: Location) -> bool:
    """Return whether two locations are the same entry of the same folder. Links are entries of their own."""
    return (one.name, one.parent.identity) == (other.name, other.parent.identity)

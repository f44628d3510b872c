"""ShardWriter: DCP storage that checksums what it writes and replaces checkpoints atomically.

This module is DCP's interface. ``write_jobs`` decides which items are written in which order, ``write_threads`` has the
threads, and ``data_file`` the bytes. ``save_start``, ``commit`` and ``save_end`` have the protocol that makes a
checkpoint visible.
"""

from __future__ import annotations

import datetime
import logging
import operator
import os
import platform
from collections.abc import Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata as distributions
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Version
from torch_xla_ckpt.reports import BEGIN, COMMIT, LOCK, PACK, RECORDS, RequestCounts, Timeline
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.storage import path_lock
from torch_xla_ckpt.storage.cancellation import clean_up, is_interrupt
from torch_xla_ckpt.storage.commit import publish
from torch_xla_ckpt.storage.commit_checks import Candidate
from torch_xla_ckpt.storage.data_file import DataFiles
from torch_xla_ckpt.storage.deadline import start as start_call
from torch_xla_ckpt.storage.file_names import new_save_id
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.lease import Holder
from torch_xla_ckpt.storage.limits import check_limits, default_threads, request_bytes
from torch_xla_ckpt.storage.location import REQUEST_TIMEOUT, Location, PathLike, path_mismatch
from torch_xla_ckpt.storage.manifest import copied_user_metadata
from torch_xla_ckpt.storage.memory_budget import MemoryBudget
from torch_xla_ckpt.storage.places import StorageEntries
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.records import Records
from torch_xla_ckpt.storage.save_end import finish, withdraw
from torch_xla_ckpt.storage.save_phases import SavePhases
from torch_xla_ckpt.storage.save_start import Beginning, find_version
from torch_xla_ckpt.storage.saved_metadata import plain, send_as_arrays, shortened
from torch_xla_ckpt.storage.stored import BLOCK
from torch_xla_ckpt.storage.write_jobs import tensor_bytes
from torch_xla_ckpt.storage.write_threads import WriteThreads
from torch_xla_ckpt.storage.written import Written, WrittenItems, written_bytes
from torch_xla_ckpt.storage.written_catalog import require_all_written, written_catalog

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _SaveInfo:
    """What the coordinator tells a process in its plan.

    Args:
        save_id: the id of the save.
        rank: the process's rank.
        nonce: the nonce that the process sent.
    """

    save_id: str
    rank: int
    nonce: str


class _ProcessInfo(NamedTuple):
    """What a process tells the coordinator in its plan.

    Args:
        nonce: the process's own nonce for this save. It shows whether a plan belongs to another save.
        path: the identity of the folder that the process saves to.
    """

    nonce: str
    path: str


class ShardWriter(StorageWriter):
    """Writes a standard DCP checkpoint with checksums, and replaces the previous checkpoint in one step.

    Any planner can use this writer. The names of data files carry the save id, so no file of an earlier save is
    touched. The manifest follows, and replacing ``.metadata`` is the commit. Files of the previous save are removed
    after the commit. Leftovers of failed saves are removed before.

    Args:
        path: a local folder or any fsspec URL. On URLs a put must be atomic, as it is in object stores.
        sync: fsync files and folders before the commit, so that a committed checkpoint survives a power failure. If
            False, the checkpoint only survives the end of the process. Default True.
        memory_budget: the most bytes of data that are fetched from devices and not yet written. If the local shards of
            one tensor are larger, they are fetched alone. A larger budget is rarely faster, because memory that was
            never used before costs more time than waiting. Default 256 MiB.
        threads: the number of writing threads. Default: one for each core, at most 8; 24 for URLs. In a local folder,
            each thread writes a data file of its own, and small items go to one more file, from the calling thread. In
            a store, data files have 8 to 32 MiB, or the size of one chunk if it is larger, so that many are put at the
            same time; with one thread there is one data file.
        step: the training step, for the manifest.
        user_metadata: any JSON value, up to 400 levels deep, for the manifest. It is copied.
        time: when the state was saved, with a time zone, for the manifest. Default: the time of the commit.
        storage_options: options for fsspec's filesystem.
        request_timeout: the time limit of a request to a remote store, in seconds. Each MiB that the request moves adds
            another second. Default 600.
        progress: show a progress bar on a terminal if the save takes long. Needs tqdm. Default False.

    Attributes:
        location: the location of the checkpoint.
        timeline: a ``Timeline`` that records what the threads of the next save do; None to record nothing.

    Raises (inside DCP's ``CheckpointException``; ``torch_xla_ckpt.save`` unwraps it):
        OSError: a file could not be written. The previous checkpoint is untouched.
        IncompleteCheckpointError: a process did not write all items of its plan.
    """

    def __init__(
        self,
        path: PathLike | Location,
        *,
        sync: bool = True,
        memory_budget: int = 256 << 20,
        threads: int | None = None,
        step: int | None = None,
        user_metadata: Any = None,
        time: datetime.datetime | None = None,
        storage_options: Mapping[str, Any] | None = None,
        request_timeout: float = REQUEST_TIMEOUT,
        progress: bool = False,
    ):
        super().__init__()
        check_limits(memory_budget, threads)
        self._sync = sync
        self._memory_budget = memory_budget
        self._threads = threads
        self._step = None if step is None else operator.index(step)
        self._user_metadata = copied_user_metadata(user_metadata)
        self._time = time
        self._storage_options = storage_options
        self._request_timeout = request_timeout
        self._progress = progress
        self.timeline: Timeline | None = None
        # The save under way.
        self._phases = SavePhases(Timeline(), RequestCounts())
        self._own_rank: int | None = None  # this rank, in a save without collectives
        self._nonce = ""
        self._save_id = ""
        self._version: futures.Future[Version] | None = None  # of ``.metadata`` in a store, on the coordinator
        self._beginning: Beginning | None = None  # only on the coordinator
        self._writing: WriteThreads | None = None  # that still put the last data files
        self._nbytes = 0
        self._processes = 1
        self._items: list[_dcp.AssignedItems | None] = []  # of each rank, on the coordinator
        self._mismatch = ""  # names the path of each rank, if the paths differ
        self.reset(path)

    def reset(self, checkpoint_id: PathLike | Location | None = None) -> None:
        """Save to another path from now on.

        Args:
            checkpoint_id: the path or URL. Default: the same path as before.
        """
        if checkpoint_id is not None:
            self.location = Location.of(checkpoint_id, self._storage_options, request_timeout=self._request_timeout)
            self._folder = open_folder(self.location, sync=self._sync)

    def announce(self, waited: float = 0.0) -> Timeline:
        """Begin to measure the next save, before DCP calls the writer.

        Args:
            waited: seconds for which the save has waited for other saves already. Default: 0.

        Returns:
            The timeline of the save.
        """
        self._phases = SavePhases(self.timeline or Timeline(), self._folder.counts(), waited)
        self._phases.is_announced = True
        return self._phases.timeline

    def look(self) -> None:
        """Begin to read the version of ``.metadata`` in a store, before DCP calls the writer.

        Call this when no earlier save to the path is under way. Only the coordinator need call it.
        """
        self._version = self._find_version()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not self._phases.is_announced:
            self.announce()
        self._phases.is_announced = False
        self._own_rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")
        version = self._version
        self.abandon()  # the save before, if it has failed
        with self._phases.timeline.span(LOCK):
            if path_lock.wait_for(self.location):
                version = None  # another save may have committed since it was read
        if self._own_rank is None and version is not None:
            self._version = version
        elif is_coordinator or self._own_rank is not None:
            self._version = self._find_version()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._folder.make()
        self._nonce = new_save_id()
        return replace(plan, storage_data=_ProcessInfo(self._nonce, self.location.identity))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._save_id = new_save_id()
        self._processes = len(plans)
        version, self._version = self._version, None
        self._beginning = Beginning(self._folder, self._save_id, self._own_rank, version, self._phases.timeline)
        if self._processes > 1:  # other processes may write as soon as they have their plans
            self._beginning.wait_for_version()
        first = self._own_rank or 0
        # A planner of DCP that caches its plans may pass the plan of another save, with another kind of data.
        told = [plan.storage_data for plan in plans]
        infos = [info if isinstance(info, _ProcessInfo) else _ProcessInfo("", "") for info in told]
        self._mismatch = path_mismatch("saves", "to", [info.path for info in infos if info.path], first)
        if self._mismatch:
            logger.warning("%s", self._mismatch)
        self._items = [plan.items if isinstance(plan.items, _dcp.AssignedItems) else None for plan in plans]
        return [
            replace(plan, storage_data=_SaveInfo(self._save_id, rank, info.nonce))
            for rank, (plan, info) in enumerate(zip(plans, infos), first)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Written]:  # type: ignore[override]
        self._phases.planned()
        try:
            results = self._write(plan, planner)
        except BaseException as error:
            if self._processes == 1:
                self.abandon(hurried=is_interrupt(error))
            elif self._beginning is not None:  # others may still write: ``abandon`` or the next save removes files
                with clean_up(hurried=is_interrupt(error)):
                    self._beginning.wait_to_clean_up().lease.end()
            raise
        self._nbytes = written_bytes(results)
        if self._writing is None:
            self._phases.written(self._nbytes)
        done: Future[Written] = Future()
        done.set_result(results)
        return done

    @without_collector
    def finish(self, metadata: Metadata, results: list[Written]) -> None:  # type: ignore[override]
        if self._beginning is None:
            raise CheckpointError("this writer has no save under way; call prepare_global_plan first")
        timeline = self._phases.timeline
        try:
            with timeline.span(RECORDS):
                finished = _dcp.finished(plain(metadata), None, self.storage_meta())
                catalog, listed, rows = written_catalog(finished, results, self._items)
                records = Records(finished, catalog, listed, rows)
                require_all_written(catalog, records.places)
            start = self._beginning.wait()
            with timeline.span(COMMIT):
                candidate = Candidate(self._folder, self._save_id, records.files, start, self._own_rank)
                manifest = timeline.timed(RECORDS, records.manifest(self._head()))
                publish(candidate, manifest, timeline.timed(RECORDS, records.pickled()), self._await_data)
                records.keep()
        except BaseException as error:
            if isinstance(error, CheckpointError) and self._mismatch:
                error.args = (f"{error}. {self._mismatch}", *error.args[1:])
            self.abandon(hurried=is_interrupt(error))
            raise
        with timeline.span("remove old files"):
            finish(self._folder, start)
        self._beginning, self._items = None, []
        # DCP returns this object from ``save``.
        metadata.storage_data, metadata.storage_meta = StorageEntries(catalog, records.places), finished.storage_meta
        self.shorten(metadata)
        if self._processes > 1:
            send_as_arrays(metadata)

    def shorten(self, metadata: Metadata) -> Metadata:
        """Let the metadata of the last save print as one line, and return it.

        ``finish`` does this on the coordinator. The other ranks receive plain metadata from DCP.
        """
        return shortened(metadata, self._phases.report(self._folder.counts()))

    def abandon(self, *, hurried: bool = False) -> None:
        """End the save under way as failed. Its files are removed now or by the next save.

        Args:
            hurried: give up waiting for the store after a few seconds. Default: only if the save was cancelled.
        """
        beginning, self._beginning = self._beginning, None
        writing, self._writing = self._writing, None
        self._version = None
        if beginning is None or not beginning.is_here:  # in a forked child, the save goes on in the parent
            return
        # An error here would hide the error that made the save fail.
        with clean_up(hurried=hurried), suppress(Exception):
            if writing is not None:
                writing.cancel()
            withdraw(self._folder, self._save_id, beginning.wait_to_clean_up(), self._own_rank)

    def _await_data(self) -> None:
        """Wait until all data files are written."""
        if self._writing is not None:
            self._writing.wait()
            self._writing = None
            self._phases.written(self._nbytes)

    def _find_version(self) -> futures.Future[Version] | None:
        """Return the future of the version of ``.metadata``; None for a folder on a local disk."""
        if not self._folder.remote:
            return None
        folder, rank, timeline = self._folder, self._own_rank, self._phases.timeline

        def find() -> Version:
            with timeline.span(BEGIN):
                return find_version(folder, rank)

        return start_call(find)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.location.url, save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str:
        """The absolute path or URL of the checkpoint."""
        return self.location.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Written:
        info: _SaveInfo = plan.storage_data
        if info.nonce != self._nonce:
            raise CheckpointError(
                "the planner passed the plan of an earlier save, whose files this save must not touch. Turn plan "
                "caching off: DefaultSavePlanner(enable_plan_caching=False)"
            )
        with self._phases.timeline.span(PACK):
            total = sum(map(tensor_bytes, plan.items))
        number = self._threads or default_threads(remote=self._folder.remote)
        in_objects = self._folder.remote and number > 1
        beginning = self._beginning
        with Progress("saving", lambda: total, self._progress) as progress:
            threads = WriteThreads(
                DataFiles(self._folder, info.rank, info.save_id, beginning.wait_for_version if beginning else bool),
                number,
                keep_tiny=not self._folder.remote,
                file_bytes=request_bytes(total, number, self._memory_budget) if in_objects else None,
                budget=MemoryBudget(self._memory_budget),
                progress=progress,
                timeline=self._phases.timeline,
            )
            results = threads.write(plan.items, planner)
            if in_objects and beginning is not None and self._processes == 1:
                self._writing = threads  # ``finish`` waits for the last files
            else:
                threads.wait()
        try:
            self._folder.flush()
        except BaseException:
            self._folder.remove(sorted({result.storage_data.relative_path for _, result in results}))
            raise
        if not isinstance(plan.items, _dcp.Items):
            return [result for _, result in results]
        with self._phases.timeline.span(PACK):
            return WrittenItems.of([(number, result.storage_data) for number, result in results])

    def _head(self) -> dict[str, Any]:
        """Return the members of the manifest that tell about the save as a whole."""
        return {
            "save_id": self._save_id,
            "time": (self._time or datetime.datetime.now(datetime.timezone.utc)).isoformat(timespec="seconds"),
            "step": self._step,
            "user_metadata": self._user_metadata,
            "software": _software(),
            "writer": str(Holder.here()),
            "block": BLOCK,
        }


def _software() -> dict[str, str]:
    """Return the versions of the installed software that writes the checkpoint."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("torch_xla", "torch_xla_ckpt"):
        with suppress(distributions.PackageNotFoundError):
            versions[name] = distributions.version(name)
    return versions

"""ShardWriter: DCP storage that checksums what it writes and replaces checkpoints atomically.

This module is DCP's interface. ``write_jobs`` decides which items are written in which order, ``write_threads`` has the
threads, ``data_file`` the bytes, and ``commit`` the protocol that makes a checkpoint visible.
"""

from __future__ import annotations

import datetime
import logging
import operator
import os
import platform
from collections.abc import Mapping
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
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.reports import LOCK, RequestCounts, Timeline
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.storage import commit, path_lock
from torch_xla_ckpt.storage.data_file import DataFiles
from torch_xla_ckpt.storage.file_names import new_save_id
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.lease import Holder
from torch_xla_ckpt.storage.limits import check_limits, default_threads, request_bytes
from torch_xla_ckpt.storage.location import REQUEST_TIMEOUT, Location, PathLike, path_mismatch
from torch_xla_ckpt.storage.manifest import copied_user_metadata
from torch_xla_ckpt.storage.memory_budget import MemoryBudget
from torch_xla_ckpt.storage.places import (
    Places,
    StorageEntries,
    Written,
    WrittenItems,
    placed,
    unplaced,
    written_bytes,
    written_sizes,
)
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.records import Records
from torch_xla_ckpt.storage.save_phases import SavePhases
from torch_xla_ckpt.storage.saved_metadata import plain, send_as_arrays, shortened
from torch_xla_ckpt.storage.stored import BLOCK
from torch_xla_ckpt.storage.write_jobs import tensor_bytes
from torch_xla_ckpt.storage.write_threads import WriteThreads

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
        self._beginning: commit.Beginning | None = None  # only on the coordinator
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

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not self._phases.is_announced:
            self.announce()
        self._phases.is_announced = False
        self._own_rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with self._phases.timeline.span(LOCK):
            path_lock.wait_for(self.location)
        self._folder.make()
        self._nonce = new_save_id()
        return replace(plan, storage_data=_ProcessInfo(self._nonce, self.location.identity))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.abandon()
        self._save_id = new_save_id()
        self._processes = len(plans)
        # A single process can fetch its first data meanwhile, and sends nothing before the save has begun.
        self._beginning = commit.Beginning(self._begin, later=self._folder.remote and self._processes == 1)
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
        except BaseException:
            if self._processes == 1:
                self.abandon()
            elif self._beginning is not None:  # others may still write: ``abandon`` or the next save removes files
                self._beginning.wait().lease.end()
            raise
        self._phases.written(written_bytes(results))
        done: Future[Written] = Future()
        done.set_result(results)
        return done

    @without_collector
    def finish(self, metadata: Metadata, results: list[Written]) -> None:  # type: ignore[override]
        if self._beginning is None:
            raise CheckpointError("this writer has no save under way; call prepare_global_plan first")
        start = self._beginning.wait()
        finished = _dcp.finished(plain(metadata), None, self.storage_meta())
        try:
            with self._phases.timeline.span("commit"):
                files = written_sizes(results)
                catalog, listed, rows = self._catalog_of(finished, results)
                places = placed(catalog, list(files), listed, rows)
                _require_all(catalog, places)
                records = Records(finished, catalog, places, files)
                manifest, pickled = records.manifest(self._head()), records.pickled()
                commit.publish(self._folder, self._save_id, files, manifest, pickled, self._own_rank, start=start)
                records.keep()
        except BaseException as error:
            if isinstance(error, CheckpointError) and self._mismatch:
                error.args = (f"{error}. {self._mismatch}", *error.args[1:])
            self.abandon()
            raise
        with self._phases.timeline.span("remove old files"):
            commit.finish(self._folder, self._save_id, start)
        self._beginning, self._items = None, []
        # DCP returns this object from ``save``.
        metadata.storage_data, metadata.storage_meta = StorageEntries(catalog, places), finished.storage_meta
        self.shorten(metadata)
        if self._processes > 1:
            send_as_arrays(metadata)

    def shorten(self, metadata: Metadata) -> Metadata:
        """Let the metadata of the last save print as one line, and return it.

        ``finish`` does this on the coordinator. The other ranks receive plain metadata from DCP.
        """
        return shortened(metadata, self._phases.report(self._folder.counts()))

    def abandon(self) -> None:
        """End the save under way as failed. Its files are removed now or by the next save."""
        beginning, self._beginning = self._beginning, None
        if beginning is not None and beginning.is_here:  # in a forked child, the save goes on in the parent
            with suppress(Exception):  # an error here would hide the error that made the save fail
                commit.withdraw(self._folder, self._save_id, beginning.wait(), self._own_rank)

    def _begin(self) -> commit.SaveStart:
        with self._phases.timeline.span("begin"):
            return commit.begin(self._folder, self._save_id, self._own_rank)

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
        total = sum(map(tensor_bytes, plan.items))
        number = self._threads or default_threads(remote=self._folder.remote)
        in_objects = self._folder.remote and number > 1
        before = None if self._beginning is None else self._beginning.wait
        with Progress("saving", lambda: total, self._progress) as progress:
            threads = WriteThreads(
                DataFiles(self._folder, info.rank, info.save_id, before),
                number,
                keep_tiny=not self._folder.remote,
                file_bytes=request_bytes(total, number, self._memory_budget) if in_objects else None,
                budget=MemoryBudget(self._memory_budget),
                progress=progress,
                timeline=self._phases.timeline,
            )
            results = threads.write(plan.items, planner)
        try:
            self._folder.flush()
        except BaseException:
            self._folder.remove(sorted({result.storage_data.relative_path for _, result in results}))
            raise
        if isinstance(plan.items, _dcp.Items):
            return WrittenItems.of([(number, result.storage_data) for number, result in results])
        return [result for _, result in results]

    def _catalog_of(
        self, metadata: Metadata, results: list[Written]
    ) -> tuple[_dcp.Catalog, list[Written], list[Integers | None]]:
        """Return everything that the checkpoint holds, the results, and the rows of the items in each rank's plan."""
        catalogs = [items.catalog for items in self._items if items is not None]
        if len(catalogs) == len(results) and catalogs[0].describes(metadata):
            return catalogs[0], results, [None if items is None else items.rows for items in self._items]
        # Another planner planned the save, or a subclass of ours has changed the metadata.
        listed = [
            own.results(items) if isinstance(own, WrittenItems) and items is not None else own
            for own, items in zip(results, self._items)
        ]
        shardings = {entry.key: entry.sharding for catalog in catalogs[:1] for entry in catalog.entries}
        for result in (result for own in listed if not isinstance(own, WrittenItems) for result in own):
            if result.storage_data.sharding:
                shardings[result.index.fqn] = result.storage_data.sharding
        return _dcp.Catalog.of(metadata, shardings), listed, [None] * len(results)

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


def _require_all(catalog: _dcp.Catalog, places: Places) -> None:
    """Check before the commit that every listed item is in a data file.

    Raises:
        IncompleteCheckpointError: naming the keys of missing items.
    """
    lost = unplaced(catalog, places)
    if lost:
        raise IncompleteCheckpointError(
            "the checkpoint was not committed, because no process wrote all of "
            + ", ".join(f"{key!r} ({parts} of its parts are missing)" for key, parts in lost.items())
            + ". The planner assigned these parts to no process. Save with SPMDSavePlanner or DCP's own planner",
            keys=tuple(lost),
        )


def _software() -> dict[str, str]:
    """Return the versions of the installed software that writes the checkpoint."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("torch_xla", "torch_xla_ckpt"):
        with suppress(distributions.PackageNotFoundError):
            versions[name] = distributions.version(name)
    return versions

"""ShardWriter: DCP storage that checksums what it writes and replaces checkpoints atomically.

One thread, the caller's, asks the planner for data, which fetches it from the devices; the others checksum and write
what has arrived, each into a file of its own. A budget of bytes keeps the first from running ahead of the others. Items
of a few bytes the first one writes itself.
"""

from __future__ import annotations

import datetime
import io
import logging
import operator
import os
import platform
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata as distributions
from itertools import groupby
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.protocols import Bytes, Folder, SaveSource, Sink
from torch_xla_ckpt.reports import Timeline
from torch_xla_ckpt.runtime import forks, without_collector
from torch_xla_ckpt.serialization import pickled_metadata
from torch_xla_ckpt.storage import commit, path_lock
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.frame import item_of
from torch_xla_ckpt.storage.lease import Holder
from torch_xla_ckpt.storage.location import REQUEST_TIMEOUT, Location, PathLike, told_apart
from torch_xla_ckpt.storage.manifest import Manifest, check_user_metadata
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.stored import BLOCK, TINY, Stored, checksum, padded

logger = logging.getLogger(__name__)

# Items are handed to a writing thread together until they have this many bytes,
_BATCH_BYTES = 4 << 20
# or this many are waiting.
_BATCH_ITEMS = 256
# Below this, an item is put together in memory and written with its neighbours.
_SMALL = 256 << 10


@dataclass(frozen=True)
class _Place:
    """What the coordinator tells each process: the save's id, the process's number, and its own nonce back."""

    save_id: str
    rank: int
    nonce: str


class _Here(NamedTuple):
    """What each process tells the coordinator: its own nonce, and the path that it saves to."""

    nonce: str
    path: str


class ShardWriter(StorageWriter):
    """Writes a standard DCP checkpoint, with checksums, over the old one or not at all.

    Any planner can use it. Data files carry the save's id, so that they never touch an older save's; the manifest
    follows, and replacing ``.metadata`` is the commit. Files of the save before it are removed after that, and what
    saves that broke off have left is removed before.

    Args:
        path: a local folder or any fsspec URL. On URLs a put must be atomic, as it is in object stores.
        sync: whether the checkpoint must survive a power failure from the moment it is committed: files and folders
            are fsynced before. Without it, it survives whatever happens to the process.
        memory_budget: bytes. Data that was fetched from devices and not yet written never takes more than this, or
            than one tensor's local shards if those are more. A larger budget is rarely faster: memory that was never
            used before costs more time than waiting.
        threads: how many threads write, each into a file. Default: one for each core up to 8; 8 for URLs. Small items
            in local folders go into one more file, from the calling thread.
        step: the training step, for the manifest.
        user_metadata: anything that is JSON, up to 400 levels deep, for the manifest.
        storage_options: for fsspec's filesystem.
        request_timeout: seconds that a remote store may take for one request, plus one for every MiB in it.
        progress: show a progress bar on a terminal when it takes long. Needs tqdm.

    Attributes:
        location: where the checkpoint is written.
        timeline: records what the next save's threads do, if it is set.

    Raises (inside DCP's ``CheckpointException``; ``torch_xla_ckpt.save`` unwraps it):
        OSError: a file could not be written. The checkpoint that was there before is untouched.
        IncompleteCheckpointError: a process did not write what the plan says.
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
        storage_options: Mapping[str, Any] | None = None,
        request_timeout: float = REQUEST_TIMEOUT,
        progress: bool = False,
    ):
        super().__init__()
        if memory_budget <= 0 or (threads is not None and threads <= 0):
            raise ValueError("memory_budget and threads must be positive")
        check_user_metadata(user_metadata)  # raises now what would otherwise fail a save
        self._sync = sync
        self._memory_budget = memory_budget
        self._threads = threads
        self._step = None if step is None else operator.index(step)
        self._user_metadata = user_metadata
        self._storage_options = storage_options
        self._request_timeout = request_timeout
        self._progress = progress
        self.timeline: Timeline | None = None
        self._own_rank: int | None = None  # of a save without collectives
        self._nonce = ""  # of the save under way, so that the plan of another one is known
        self._save_id = ""
        self._start: commit.Start | None = None  # of the save under way, in the process that coordinates it
        self._processes = 1
        self._apart = ""  # which rank saves to which path, if they differ
        self.reset(path)

    def reset(self, checkpoint_id: PathLike | Location | None = None) -> None:
        if checkpoint_id is not None:
            self.location = Location.of(checkpoint_id, self._storage_options, request_timeout=self._request_timeout)
            self._folder = open_folder(self.location, sync=self._sync)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._own_rank = None if kwargs.get("use_collectives", True) else kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        path_lock.wait_for(self.location)
        self._folder.make()
        self._nonce = commit.new_save_id()
        return replace(plan, storage_data=_Here(self._nonce, self.location.identity))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.abandon()
        self._save_id = commit.new_save_id()
        self._processes = len(plans)
        self._start = commit.begin(self._folder, self._save_id, self._own_rank)
        first = self._own_rank or 0
        # A planner of DCP that caches its plans may hand over another save's.
        here = [plan.storage_data if isinstance(plan.storage_data, _Here) else _Here("", "") for plan in plans]
        self._apart = told_apart("saves", "to", [one.path for one in here if one.path], first)
        if self._apart:
            logger.warning("%s", self._apart)
        places = (_Place(self._save_id, first + n, one.nonce) for n, one in enumerate(here))
        return [replace(plan, storage_data=place) for plan, place in zip(plans, places)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            written = self._written(plan, planner)
        except BaseException:
            if self._processes == 1:
                self.abandon()
            elif self._start is not None:  # other processes may still write: ``abandon`` or the next save clears up
                self._start.lease.end()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def _written(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        place: _Place = plan.storage_data
        if place.nonce != self._nonce:
            raise CheckpointError(
                "the planner gave the plan of an earlier save, whose files this one must not touch. Turn its plan "
                "caching off: DefaultSavePlanner(enable_plan_caching=False)"
            )
        lanes = _Lanes(
            self._folder, place, self._threads or (8 if self._folder.remote else min(8, os.cpu_count() or 1))
        )
        budget = _Budget(self._memory_budget)
        with Progress("saving", lambda: sum(map(_size, plan.items)), self._progress) as progress:
            written = _write(plan.items, planner, lanes, budget, progress, self.timeline or Timeline())
        try:
            self._folder.flush()
        except BaseException:
            self._folder.remove(list(_files(result.storage_data for result in written)))
            raise
        return written

    @without_collector
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {result.index: result.storage_data for own in results for result in own}
        finished = _dcp.finished(metadata, stored, self.storage_meta())
        files = _files(stored.values())
        places = _places(stored)
        start = self._start
        if start is None:
            raise CheckpointError("this writer has no save under way; call prepare_global_plan first")
        try:
            with (self.timeline or Timeline()).span("commit"):
                self._commit(finished, places, files, start)
        except BaseException as error:
            if isinstance(error, CheckpointError) and self._apart:
                error.args = (f"{error}. {self._apart}", *error.args[1:])
            self.abandon()
            raise
        commit.finish(self._folder, self._save_id, start)
        self._start = None
        metadata.storage_data, metadata.storage_meta = places, finished.storage_meta  # ``save`` returns it

    def abandon(self) -> None:
        """Say that the save under way has failed: what it wrote is removed, now or by the next save."""
        start, self._start = self._start, None
        if start is not None and start.lease.is_here:  # in a forked child, the save goes on in the parent
            with suppress(Exception):  # what went wrong before is the error to report
                commit.withdraw(self._folder, self._save_id, start, self._own_rank)

    def _commit(
        self,
        finished: Metadata,
        places: Mapping[MetadataIndex, Any],
        files: Mapping[str, int],
        start: commit.Start,
    ) -> None:
        _require_all(finished)
        manifest = Manifest(
            save_id=self._save_id,
            time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            step=self._step,
            user_metadata=self._user_metadata,
            software=_software(),
            metadata=finished,
            files=dict(sorted(files.items())),
            writer=str(Holder.here()),
        )
        pickled = pickled_metadata(replace(finished, storage_data=places))
        commit.publish(self._folder, manifest, pickled, self._own_rank, start=start)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.location.url, save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str:
        return self.location.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


class _Job(NamedTuple):
    """An item on its way to a file, the bytes of its tensor, and what it holds of the budget."""

    item: WriteItem
    data: torch.Tensor | io.BytesIO
    sharding: str | None
    size: int
    cost: int


class _Failed(Exception):
    """Another thread has failed, and has said why."""


class _Budget:
    """Bytes that may be in memory at a time; one request larger than all of them is let in alone."""

    def __init__(self, size: int):
        self._size = size
        self._used = 0
        self._failed = False
        self._changed = threading.Condition()

    def take(self, cost: int, *, wait: bool = True) -> bool:
        """Wait for room, or say at once whether there is some.

        Raises:
            _Failed: there will be none.
        """
        with self._changed:
            while not self._failed and self._used and self._used + cost > self._size:
                if not wait:
                    return False
                self._changed.wait()
            if self._failed:
                raise _Failed
            self._used += cost
            return True

    def give_back(self, cost: int) -> None:
        with self._changed:
            self._used -= cost
            self._changed.notify_all()

    def fail(self) -> None:
        """Wake and refuse whoever waits."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class _Lanes:
    """The files that one process writes, and where the next thread finds its own."""

    def __init__(self, folder: Folder, place: _Place, count: int):
        self.count = count
        self.remote = folder.remote
        self._folder = folder
        self._place = place
        self._taken = 0
        self._lock = threading.Lock()

    def open(self) -> _Lane:
        with self._lock:
            name = commit.data_name(self._place.rank, self._taken, self._place.save_id)
            self._taken += 1
        return _Lane(name, self._folder.create(name))


class _Lane:
    """One data file: items one after the other, each at a multiple of ``ALIGNMENT``."""

    def __init__(self, name: str, sink: Sink):
        self._name = name
        self._sink = sink
        self._end = 0
        self._small: list[Bytes] = []  # what is not written yet
        self._small_bytes = 0

    def append(self, parts: Sequence[Bytes], data: int | None, sharding: str | None) -> Stored:
        """Write an item that consists of ``parts``, one after the other."""
        length = sum(map(len, parts))
        parts = (*parts, bytes(padded(length) - length))
        start, self._end = self._end, self._end + padded(length)
        if length < _SMALL:
            whole = b"".join(parts)
            checksums = checksum(whole)
            self._small.append(whole)
            self._small_bytes += len(whole)
            if self._small_bytes >= _BATCH_BYTES:
                self._flush()
        else:
            self._flush()
            checksums = b"".join(self._write_block(block) for block in _blocks(parts))
        return Stored(self._name, start, length, data, checksums, sharding)

    def close(self) -> None:
        self._flush()
        self._sink.close()

    def abandon(self) -> None:
        self._sink.abandon()

    def _write_block(self, block: Sequence[Bytes]) -> bytes:
        """Write bytes while they are still in the processor's cache from being checksummed."""
        hasher = xxhash.xxh3_64()
        for piece in block:
            hasher.update(piece)
            self._sink.write(piece)
        return hasher.digest()

    def _flush(self) -> None:
        if self._small:
            self._sink.write(b"".join(self._small))
            self._small, self._small_bytes = [], 0


def _blocks(parts: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """The bytes of ``parts`` in blocks of ``BLOCK``, each as the pieces it consists of."""
    block: list[Bytes] = []
    room = BLOCK
    for part in parts:
        rest = memoryview(part)
        while rest:
            piece, rest = rest[:room], rest[room:]
            block.append(piece)
            room -= len(piece)
            if not room:
                yield block
                block, room = [], BLOCK
    if block:
        yield block


def _write(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    lanes: _Lanes,
    budget: _Budget,
    progress: Progress,
    timeline: Timeline,
) -> list[WriteResult]:
    """Fetch here, write in threads; returns when everything is in its file, or raises and leaves no file.

    Raises:
        whatever the planner or the first thread that failed raised, or an interrupt before that.
    """
    jobs: queue.SimpleQueue[list[_Job] | None] = queue.SimpleQueue()
    results: list[WriteResult] = []
    failures: list[BaseException] = []
    opened: list[_Lane] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        budget.fail()

    def write(batches: Iterable[list[_Job]]) -> None:
        lane: _Lane | None = None
        for batch in batches:
            if failures:
                return
            if lane is None:
                lane = lanes.open()
                opened.append(lane)
            cost = sum(job.cost for job in batch)
            with timeline.span("write", sum(job.size for job in batch)):
                results.extend(_put(job, lane, progress) for job in batch)
            batch.clear()  # whoever still knows the list must not keep the tensors
            budget.give_back(cost)
        if lane is not None and not failures:
            lane.close()

    def work(ended: threading.Event) -> None:
        try:
            write(iter(jobs.get, None))
        except BaseException as error:
            fail(error)
        finally:
            ended.set()

    def small(batches: Iterable[list[_Job]]) -> Iterator[list[_Job]]:
        """Leave large batches to the threads and pass small ones on: Python's lock would only be fought over."""
        for batch in batches:
            if not lanes.remote and sum(map(_in_memory, batch)) <= TINY * len(batch):
                yield batch
            else:
                jobs.put(batch)

    owner = forks.Owner()
    # Events, because Python takes a thread for ended when an interrupt breaks off join().
    ends: list[threading.Event] = []
    try:
        for number in range(lanes.count):
            ended = threading.Event()
            threading.Thread(target=work, args=(ended,), name=f"ShardWriter-{number}").start()
            ends.append(ended)
        write(small(_batches(items, planner, budget, timeline)))
        _end(ends, jobs)
    except _Failed:
        pass
    except BaseException as error:  # KeyboardInterrupt too: no thread may go on writing
        if not owner.is_here:  # a child that the planner forked: threads and files are the parent's
            raise
        fail(error)
    _end(ends, jobs)
    if failures:
        for lane in opened:
            lane.abandon()
        raise next((error for error in failures if not isinstance(error, Exception)), failures[0])
    return results


def _end(ends: Sequence[threading.Event], jobs: queue.SimpleQueue[list[_Job] | None]) -> None:
    """Let the threads finish what is queued."""
    for _ in ends:
        jobs.put(None)
    for ended in ends:
        ended.wait()


def _batches(
    items: Sequence[WriteItem], planner: SavePlanner, budget: _Budget, timeline: Timeline
) -> Iterator[list[_Job]]:
    """The items' data, in the plan's order, as the budget has room for it."""
    describing = planner if isinstance(planner, SaveSource) else None
    batch: list[_Job] = []
    waiting = 0

    def source(item: WriteItem) -> tuple[str, int | None]:
        """What else is brought to the host with an item."""
        if item.tensor_data is None:
            return item.index.fqn, None
        return item.index.fqn, 0 if describing is None else describing.part(item)

    for (key, part), group in groupby(items, source):
        together = list(group)
        sizes = list(map(_size, together))
        sharding, cost = None, sum(sizes)
        if describing is not None and part is not None:
            sharding, cost = describing.sharding(key), describing.host_bytes(key, part)
        if not budget.take(cost, wait=False):
            if batch:  # what waits here must be written before there can be room
                yield batch
                batch, waiting = [], 0
            with timeline.span("wait for the writers"):
                budget.take(cost)
        for number, (item, size) in enumerate(zip(together, sizes), 1):
            # The shards of a part are let go together, when the last of them has been written.
            held = cost if number == len(together) else 0
            data = _fetched(item, planner, timeline) if size >= _SMALL else planner.resolve_data(item)
            batch.append(_Job(item, data, sharding, size, held))
            waiting += size
            if waiting >= _BATCH_BYTES or len(batch) >= _BATCH_ITEMS:
                yield batch
                batch, waiting = [], 0
    if batch:
        yield batch


def _fetched(item: WriteItem, planner: SavePlanner, timeline: Timeline) -> torch.Tensor | io.BytesIO:
    with timeline.span("fetch", _size(item)):
        return planner.resolve_data(item)


def _put(job: _Job, lane: _Lane, progress: Progress) -> WriteResult:
    if isinstance(job.data, torch.Tensor):
        try:
            parts, data = item_of(job.data)
        except CheckpointError as error:
            raise CheckpointError(f"{job.item.index.fqn!r}: {error}") from error
    else:
        parts, data = (job.data.getbuffer(),), None
    stored = lane.append(parts, data, job.sharding)
    progress.advance(job.size)
    return WriteResult(job.item.index, stored.length, stored)


def _in_memory(job: _Job) -> int:
    """The bytes that there are to write, but for what surrounds a tensor's."""
    return job.size if isinstance(job.data, torch.Tensor) else job.data.getbuffer().nbytes


def _size(item: WriteItem) -> int:
    """The bytes of an item's tensor."""
    tensor = item.tensor_data
    return 0 if tensor is None else tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize


def _require_all(metadata: Metadata) -> None:
    """Show, before it becomes visible, that everything the checkpoint lists is in its files.

    Raises:
        IncompleteCheckpointError: naming what is not.
    """
    lost = _dcp.unstored(metadata, metadata.state_dict_metadata)
    if lost:
        raise IncompleteCheckpointError(
            "no process wrote these items, so the checkpoint was not committed: "
            + ", ".join(f"{key!r} ({len(parts)} of its parts)" for key, parts in lost.items())
            + ". The planner gave them to nobody; save with SPMDSavePlanner or DCP's own",
            keys=tuple(lost),
        )


def _files(stored: Iterable[Stored]) -> dict[str, int]:
    """The data files that items lie in, with their sizes."""
    files: dict[str, int] = {}
    for item in stored:
        files[item.relative_path] = max(files.get(item.relative_path, 0), item.offset + item.extent)
    return files


def _places(stored: Mapping[MetadataIndex, Stored]) -> dict[MetadataIndex, Any]:
    """Where items lie, as stock DCP records it."""
    return {index: _dcp.storage_info(item.relative_path, item.offset, item.length) for index, item in stored.items()}


def _software() -> dict[str, str]:
    """Versions of what wrote the checkpoint, where they are installed."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("torch_xla", "torch_xla_ckpt"):
        with suppress(distributions.PackageNotFoundError):
            versions[name] = distributions.version(name)
    return versions

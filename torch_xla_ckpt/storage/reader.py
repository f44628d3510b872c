"""ShardReader: DCP storage that reads the bytes a load needs, each once, and checks them.

This module implements DCP's ``StorageReader``. ``read_plan`` decides what is read in which order, ``read_jobs`` runs
the threads, and ``read_bytes`` reads, checks and decodes. Reading threads get bytes from memory maps or by concurrent
requests, and fill the planner's buffers. Meanwhile the caller's thread commits finished tensors, so that tensors reach
their devices while more bytes arrive.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from torch_xla_ckpt.cooperation import Cooperation, Exchange, Needs, Share
from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, ReplacedCheckpointError
from torch_xla_ckpt.protocols import ElementSink, Folder
from torch_xla_ckpt.reports import RequestCounts
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.storage.absent import no_checkpoint
from torch_xla_ckpt.storage.checkpoint_index import CheckpointIndex, read_index, version_of
from torch_xla_ckpt.storage.file_names import metadata_name
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.foreign import LACKING, read_foreign
from torch_xla_ckpt.storage.limits import check_limits, default_threads, request_bytes
from torch_xla_ckpt.storage.location import REQUEST_TIMEOUT, Location, PathLike, path_mismatch
from torch_xla_ckpt.storage.manifest import Manifest
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.read_bytes import JobReader
from torch_xla_ckpt.storage.read_jobs import JobRunner
from torch_xla_ckpt.storage.read_plan import JOB_BYTES, jobs_of, reads_by_key
from torch_xla_ckpt.storage.read_target import ElementTarget, PlannerTarget, ReadTarget
from torch_xla_ckpt.storage.shared_index import FoundIndex, read_together
from torch_xla_ckpt.storage.shared_reads import Position, SharedJobReader, SharedPlan, needs_of, shared_jobs

logger = logging.getLogger(__name__)


@dataclass
class ReadStats:
    """Bytes that a reader handled since its last ``read_metadata``.

    Args:
        bytes_read: bytes read from data files. A byte that was read twice counts twice. Whole blocks, when checksums
            are verified.
        bytes_needed: bytes of the tensors and objects that the planner requested.
        bytes_received: bytes that other ranks read and passed on to this one.
        requests: requests to the store, those for metadata included; none for local files.
    """

    bytes_read: int = 0
    bytes_needed: int = 0
    bytes_received: int = 0
    requests: RequestCounts = field(default_factory=RequestCounts)


class _FoundCheckpoint(NamedTuple):
    """The checkpoint that one rank has found. The coordinator compares those of all ranks."""

    version: bytes | None
    path: str
    needs: Needs | None


class ShardReader(StorageReader):
    """Reads DCP checkpoints of any writer, safetensors files and folders, and ``torch.save`` files.

    Any planner can use a ``ShardReader``. Local files are memory-mapped; remote files are read with concurrent ranged
    requests. Of each saved chunk, only the blocks with needed bytes are read, each once. Checkpoints of other writers
    have no manifest; their items are read whole and compared with the CRC-32 of torch's archives. Of safetensors and
    ``torch.save`` files, which have no checksums either, exactly the needed bytes are read; of remote ones, gaps up to
    64 KiB between them too.

    Args:
        path: the checkpoint's folder, or a file: a local path or any fsspec URL.
        verify: check everything that is read against the manifest's checksums. Without checks, damage stays unnoticed
            unless a file is too short. Default: True.
        memory_budget: host memory in bytes for what is read and not committed yet. Default: 1 GiB. One tensor's local
            shards and the largest of its chunks may exceed the budget. Memory maps do not count.
        threads: number of threads that read and check. Default: one for each core, at most 8. For URLs, the number of
            requests at the same time: 24 by default. Other threads, one for each core, check what was read.
        storage_options: options of the fsspec filesystem behind a URL, such as ``{"anon": True}`` or
            ``{"endpoint_url": ...}``. Local paths ignore them. Default: none.
        request_timeout: seconds that a remote store may take for one request, plus one second for each MiB in the
            request. Default: 600.
        progress: show a progress bar on a terminal if loading takes long. Needs tqdm. Default: False.

    Attributes:
        location: the checkpoint's folder.
        stats: bytes read and needed since the last ``read_metadata``, a ``ReadStats``.
        manifest: the checkpoint's ``Manifest``, once its metadata has been read; None if another writer wrote the
            checkpoint.
        version: a checksum of ``.metadata`` as it was read; of the headers, for other formats.
        texts: the texts under ``__metadata__`` of safetensors files, once their headers have been read.

    Raises (inside DCP's ``CheckpointException``; ``torch_xla_ckpt.load`` unwraps it):
        CorruptCheckpointError: bytes are not what was written. Key, file and byte range are named.
        ReplacedCheckpointError: another save replaced the checkpoint while it was read.
        UnsafeObjectError: ``.metadata`` or a tensor's item names something that could run code.
        CheckpointError: the folder holds no checkpoint. If it is the folder of a run, the run's steps are named.
    """

    def __init__(
        self,
        path: PathLike | Location,
        *,
        verify: bool = True,
        memory_budget: int = 1 << 30,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        request_timeout: float = REQUEST_TIMEOUT,
        progress: bool = False,
    ):
        super().__init__()
        check_limits(memory_budget, threads)
        self._verify = verify
        self._memory_budget = memory_budget
        self._threads = threads
        self._storage_options = storage_options
        self._request_timeout = request_timeout
        self._progress = progress
        self._cooperation: Cooperation | None = None
        self.reset(path)

    def reset(self, checkpoint_id: PathLike | Location | None = None) -> None:
        """Forget the checkpoint that was read last.

        Args:
            checkpoint_id: the next checkpoint to read. Default: the one at the same path.
        """
        if checkpoint_id is not None:
            self.location = Location.of(checkpoint_id, self._storage_options, request_timeout=self._request_timeout)
            self._root = open_folder(self.location)
        self._requests_before = self._root.counts()
        self._folder = self._root
        self._is_foreign = False
        self.stats = ReadStats()
        self.manifest: Manifest | None = None
        self.version: bytes | None = None
        self.texts: Mapping[str, str] = {}
        self._rank: int | None = None
        self._positions: list[Position] = []
        self._pinned = False

    @without_collector
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata of the checkpoint.

        DCP swallows errors of this method. So an error is stored in the returned metadata, which raises the error when
        a planner uses it.
        """
        self.stats = ReadStats()
        self._requests_before = self._root.counts()
        try:
            found = self._read_index(kwargs.get("rank"))
        except FileNotFoundError:
            raise  # DCP then asks for the metadata that this rank saved by itself
        except Exception as error:
            return _UnreadableMetadata(error)
        self.manifest = found.manifest
        if self._pinned and found.version != self.version:
            return _UnreadableMetadata(self._replaced())
        self.version = found.version
        self.texts = found.texts
        self._rank = kwargs.get("rank")
        return found.metadata

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Within the block, read only the checkpoint whose metadata was read last.

        Raises (where metadata is read):
            ReplacedCheckpointError: another checkpoint is there now.
        """
        self._pinned = True
        try:
            yield
        finally:
            self._pinned = False

    @contextmanager
    def together(self, cooperation: Cooperation | None) -> Iterator[None]:
        """Within the block, read each byte once on all ranks together. All ranks must enter and leave the block.

        Args:
            cooperation: the agreement of the ranks; None changes nothing. A reader that reads together already goes on
                with its first agreement.
        """
        if cooperation is None or self._cooperation is not None:
            yield
            return
        self._cooperation = cooperation
        try:
            yield
        finally:
            self._cooperation = None
            cooperation.end()

    def disconnect(self) -> None:
        """Close the connections to the other ranks after a load that failed. All ranks must call this."""
        if self._cooperation is not None:
            self._cooperation.end()

    @property
    def is_together(self) -> bool:
        """Whether a ``together`` block with an agreement is running."""
        return self._cooperation is not None

    @property
    def is_pinned(self) -> bool:
        """Whether a ``pinned`` block is running."""
        return self._pinned

    @property
    def is_foreign(self) -> bool:
        """Whether the checkpoint that was read last is a safetensors or ``torch.save`` file or folder."""
        return self._is_foreign

    def _read_index(self, rank: int | None) -> CheckpointIndex:
        find = functools.partial(self._find_index, rank)
        if self._cooperation is None or rank is not None:
            found = find(self._root)
        else:
            found = read_together(self._cooperation, self._root, find)
        self._is_foreign = found.is_foreign
        self._folder = open_folder(self.location.parent) if found.in_parent else self._root
        return found.index

    def _find_index(self, rank: int | None, folder: Folder) -> FoundIndex:
        """Find the checkpoint at the path.

        Args:
            rank: the rank whose own metadata is read. None: the metadata of all ranks.
            folder: the folder at the path.
        """
        try:
            return FoundIndex(read_index(folder, rank, verify=self._verify))
        except (FileNotFoundError, NotADirectoryError):
            foreign = read_foreign(self.location, self._root)
            if foreign is not None:
                return FoundIndex(foreign.index, in_parent=foreign.folder is not self._root, is_foreign=True)
            ranks_own = metadata_name(0) in folder.names()
            if rank is None and ranks_own:
                raise
            raise no_checkpoint(self._root, "no metadata of this rank" if ranks_own else LACKING) from None

    def _current_version(self) -> bytes | None:
        """Return the checksum by which the checkpoint that is there now is known; None if there is none."""
        if not self._is_foreign:
            return version_of(self._folder, self._rank)
        try:
            foreign = read_foreign(self.location, self._root)
        except (CheckpointError, OSError):
            return self.version  # what is there cannot be read, and the error of the caller explains more
        return None if foreign is None else foreign.index.version

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(metadata, _UnreadableMetadata):
            raise metadata.error
        if not isinstance(metadata.storage_data, Mapping):
            raise CheckpointError(
                f"cannot read {self._folder.url}: its metadata does not say in which files its items lie. Read the "
                "checkpoint with the storage reader that belongs to its writer"
            )
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        needs: Needs | None = None
        if self._cooperation is not None and self._rank is None:
            reads = reads_by_key(plan.items, self._metadata)
            needs, self._positions = needs_of(reads, self._metadata, self._verify, self._memory_budget)
        return replace(plan, storage_data=_FoundCheckpoint(self.version, self.location.identity, needs))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found: list[_FoundCheckpoint] = [plan.storage_data for plan in plans]
        other_paths = path_mismatch("loads", "from", [one.path for one in found])
        if len({one.version for one in found}) > 1 and self._rank is None:
            raise ReplacedCheckpointError(
                f"the checkpoint in {self.location} was replaced while it was read: the processes have found different "
                f"ones. Load again{other_paths and f'. But {other_paths}'}"
            )
        if other_paths:
            logger.warning("%s", other_paths)
        needs = [one.needs for one in found if one.needs is not None]
        shares = self._cooperation.assign(needs) if self._cooperation and len(needs) == len(plans) else None
        if shares is None:
            return [replace(plan, storage_data=None) for plan in plans]
        return [replace(plan, storage_data=share) for plan, share in zip(plans, shares)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        share = plan.storage_data if isinstance(plan.storage_data, Share) else None
        self._read(plan.items, PlannerTarget(planner), share)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def read_elements(self, items: Sequence[ReadItem], sink: ElementSink) -> None:
        """Read regions of tensors into a sink, without a planner.

        Args:
            items: the reads, of tensors only.
            sink: receives the elements of each read.
        """
        self._read(items, ElementTarget(sink))

    def require_current(self, error: Exception) -> None:
        """Make sure that what looks like damage is not a replaced checkpoint.

        Args:
            error: the error that reports damage.

        Raises:
            ReplacedCheckpointError: ``.metadata`` has changed since it was read.
        """
        if self.version is not None and self._current_version() != self.version:
            raise self._replaced() from error

    def _replaced(self) -> ReplacedCheckpointError:
        return ReplacedCheckpointError(
            f"the checkpoint in {self.location} was replaced or removed while it was read. The checkpoint that is now "
            "there may be whole: load again"
        )

    def _read(self, items: Sequence[ReadItem], target: ReadTarget, share: Share | None = None) -> None:
        try:
            if share is None or self._cooperation is None:
                self._run(items, target, None)
                return
            exchange = self._cooperation.exchange()
            with exchange.aborted_on_error():
                self._run(items, target, (exchange, SharedPlan(share, self._positions)))
        except CorruptCheckpointError as error:
            self.require_current(error)
            raise

    def _run(self, items: Sequence[ReadItem], target: ReadTarget, together: tuple[Exchange, SharedPlan] | None) -> None:
        """Read what is requested.

        Args:
            items: the requests.
            target: receives the results.
            together: the connections to the other ranks, and this rank's part of reading together; None to read alone.
        """
        reads = reads_by_key(items, self._metadata, target.buffer_bytes)
        needed = sum(key_reads.needed_bytes for key_reads in reads)
        self.stats.bytes_needed += needed
        remote = self._folder.remote
        # Threads that wait for other ranks need no processor cores, like those that wait for a store.
        waits = remote or together is not None
        threads = self._threads or default_threads(remote=waits)
        job_bytes = request_bytes(needed, threads, self._memory_budget) if remote else JOB_BYTES
        reader = (
            JobReader(self._folder, target, self._verify)
            if together is None
            else SharedJobReader(self._folder, target, self._verify, *together)
        )
        with Progress("loading", lambda: needed, self._progress) as progress:
            runner = JobRunner(
                self._folder,
                reader,
                target,
                threads=threads,
                delivering=min(threads, default_threads(remote=False)) if waits else 0,
                memory_budget=self._memory_budget,
                progress=progress,
            )
            try:
                # Objects first: if one of them is refused, every tensor is as it was.
                for is_tensor in (False, True):
                    some = [key_reads for key_reads in reads if key_reads.is_tensor is is_tensor]
                    runner.run(
                        jobs_of(some, remote, job_bytes) if together is None else shared_jobs(some, together[1], remote)
                    )
            finally:
                self.stats.bytes_read += runner.bytes_read
                self.stats.bytes_received += runner.bytes_received
                self.stats.requests = self._root.counts() - self._requests_before
                self._folder.release()

    @property
    def checkpoint_id(self) -> str:
        return self.location.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


class _UnreadableMetadata(Metadata):
    """Metadata that could not be read. Using it raises the error of the attempt."""

    def __init__(self, error: Exception):
        self.error = error
        self.planner_data = self.storage_data = None
        self.storage_meta = StorageMeta()

    @property
    def state_dict_metadata(self) -> dict[str, Any]:  # type: ignore[override]
        raise self.error

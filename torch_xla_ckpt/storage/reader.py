"""ShardReader: DCP storage that reads the bytes that are needed, once, and checks them.

Reading goes in jobs of some saved items each. Threads get a job's bytes (from a memory map, or by concurrent requests),
check them and copy them into the planner's buffers; the caller's thread commits what is ready, so that tensors reach
their devices while further bytes arrive.
"""

from __future__ import annotations

import io
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    Damage,
    ReplacedCheckpointError,
    UnsafeObjectError,
)
from torch_xla_ckpt.protocols import Folder, LoadSink, Window
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.serialization import Refused, restricted
from torch_xla_ckpt.storage.checkpoint_index import CheckpointIndex, read_index, version_of
from torch_xla_ckpt.storage.file_errors import NOT_A_FILE, TRANSIT, NotAFile
from torch_xla_ckpt.storage.file_names import metadata_name
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.limits import check_limits, default_threads
from torch_xla_ckpt.storage.location import REQUEST_TIMEOUT, Location, PathLike, path_mismatch
from torch_xla_ckpt.storage.manifest import BLOCK, TINY, Manifest, Stored, checksum, foreign
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.ranges import MAX_GAP, Range, blocks_of, merged, ranges_of

logger = logging.getLogger(__name__)

# Items are read together until they have this many bytes,
_JOB_BYTES = 32 << 20
# or there are this many.
_JOB_ITEMS = 1024
# A smaller tensor is copied rather than handed over in the memory it was read into.
_ADOPT_BYTES = 64 << 10

# Types to copy bits with, by size; numpy lacks many of torch's.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class ReadStats:
    """What a reader did since its last ``read_metadata``.

    Args:
        bytes_read: of the data files, each byte counted as often as it was read. Whole blocks, when checksums are
            verified.
        bytes_needed: of the tensors and objects that were asked for.
    """

    bytes_read: int = 0
    bytes_needed: int = 0


class _Found(NamedTuple):
    """What each process tells the coordinator: which checkpoint it has found, and at which path."""

    version: bytes | None
    path: str


class ShardReader(StorageReader):
    """Reads DCP checkpoints: those of ``ShardWriter`` and of any other writer.

    Any planner can use it. Local files are memory-mapped, others read with concurrent ranged requests. Of each saved
    chunk only the blocks with the needed bytes are read, and each once. Checkpoints without a manifest were written by
    others; they have no checksums, and their items are read whole.

    Args:
        path: a local folder or any fsspec URL.
        verify: check all that is read against the manifest's checksums. Without it, damage passes unseen, except
            where files are too short.
        memory_budget: bytes. What was read and is not committed yet never takes more than this, or than one tensor's
            local shards and the largest of its chunks if those are more. Memory maps do not count.
        threads: how many threads read and check. Default: one for each core up to 8; 8 for URLs.
        storage_options: for fsspec's filesystem.
        request_timeout: seconds that a remote store may take for one request, plus one for every MiB in it.
        progress: show a progress bar on a terminal when it takes long. Needs tqdm.

    Attributes:
        location: where the checkpoint lies.
        stats: a ``ReadStats``.
        manifest: the checkpoint's ``Manifest`` once its metadata has been read; None if it was written by others.
        version: a checksum of ``.metadata`` as it was read.

    Raises (inside DCP's ``CheckpointException``; ``torch_xla_ckpt.load`` unwraps it):
        CorruptCheckpointError: bytes are not what was written. Key, file and byte range are named.
        ReplacedCheckpointError: another save replaced the checkpoint while it was read.
        UnsafeObjectError: ``.metadata`` or a tensor's item names something that could run code.
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
        self.reset(path)

    def reset(self, checkpoint_id: PathLike | Location | None = None) -> None:
        if checkpoint_id is not None:
            self.location = Location.of(checkpoint_id, self._storage_options, request_timeout=self._request_timeout)
            self._folder = open_folder(self.location)
        self.stats = ReadStats()
        self.manifest: Manifest | None = None
        self.version: bytes | None = None
        self._rank: int | None = None
        self._pinned = False

    @without_collector
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's metadata.

        DCP swallows what is raised here. So an error is kept in what is returned, and raised when a planner looks at
        it.
        """
        self.stats = ReadStats()
        try:
            found = self._committed(kwargs.get("rank"))
        except FileNotFoundError:
            raise  # DCP goes on to ask for the rank's own
        except Exception as error:
            return _Unreadable(error)
        self.manifest = found.manifest
        if self._pinned and found.version != self.version:
            return _Unreadable(self._replaced())
        self.version = found.version
        self._rank = kwargs.get("rank")
        return found.metadata

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Within the block, read no other checkpoint than the one whose metadata was read last.

        Raises (where metadata is read):
            ReplacedCheckpointError: there is another one now.
        """
        self._pinned = True
        try:
            yield
        finally:
            self._pinned = False

    @property
    def is_pinned(self) -> bool:
        return self._pinned

    def _committed(self, rank: int | None) -> CheckpointIndex:
        try:
            return read_index(self._folder, rank, verify=self._verify)
        except FileNotFoundError:
            ranks_own = metadata_name(0) in self._folder.names()
            if rank is None and ranks_own:
                raise
            what = "no metadata of this rank" if ranks_own else f"no {metadata_name(None)}"
            raise CheckpointError(
                f"there is no checkpoint in {self._folder.url}: it has {what}. Check the path; a save that was "
                "interrupted leaves none"
            ) from None

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if isinstance(metadata, _Unreadable):
            raise metadata.error
        if not isinstance(metadata.storage_data, Mapping):
            raise CheckpointError(f"the metadata in {self._folder.url} does not say where its items lie")
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=_Found(self.version, self.location.identity))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        apart = path_mismatch("loads", "from", [plan.storage_data.path for plan in plans])
        if len({plan.storage_data.version for plan in plans}) > 1 and self._rank is None:
            raise ReplacedCheckpointError(
                f"the checkpoint in {self.location} was replaced while it was read: the processes have found different "
                f"ones. Load again{apart and f'. But {apart}'}"
            )
        if apart:
            logger.warning("%s", apart)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        try:
            self._read_data(plan, planner)
        except CorruptCheckpointError as error:
            self.require_current(error)
            raise
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def require_current(self, error: Exception) -> None:
        """Show that what looks like damage is not only that the checkpoint is no longer the one that was begun.

        Raises:
            ReplacedCheckpointError: ``.metadata`` has changed.
        """
        if self.version is not None and version_of(self._folder, self._rank) != self.version:
            raise self._replaced() from error

    def _replaced(self) -> ReplacedCheckpointError:
        return ReplacedCheckpointError(
            f"the checkpoint in {self.location} was replaced or removed while it was read. What is there now may be "
            "whole: load again"
        )

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        adopting = planner if isinstance(planner, LoadSink) else None
        groups = _groups(plan.items, self._metadata, adopting)
        self.stats.bytes_needed += sum(piece.needed for group in groups for piece in group.pieces)
        work = _Reading(self._folder, planner, adopting, self._verify, self.stats)
        threads = self._threads or default_threads(remote=self._folder.remote)
        try:
            with Progress("loading", lambda: sum(group.needed for group in groups), self._progress) as progress:
                # Objects first: one that is refused then leaves every tensor as it was.
                for kind in (False, True):
                    some = [group for group in groups if group.is_tensor is kind]
                    work.run(_jobs(some, self._folder.remote), threads, self._memory_budget, progress)
        finally:
            self._folder.release()

    @property
    def checkpoint_id(self) -> str:
        return self.location.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))


class _Unreadable(Metadata):
    """Metadata that could not be read, and says why when it is looked at."""

    def __init__(self, error: Exception):
        self.error = error
        self.planner_data = self.storage_data = None
        self.storage_meta = StorageMeta()

    @property
    def state_dict_metadata(self) -> dict[str, Any]:  # type: ignore[override]
        raise self.error


@dataclass(slots=True)
class _Piece:
    """A saved item, and what is wanted of it.

    Args:
        key: in the checkpoint.
        stored: where it lies.
        saved: the tensor it is a chunk of; None for objects.
        shape: of the chunk.
        reads: what is wanted.
        needed: bytes that are asked for.
    """

    key: str
    stored: Stored
    saved: TensorStorageMetadata | None
    shape: torch.Size
    reads: list[ReadItem] = field(default_factory=list)
    needed: int = 0

    def add(self, read: ReadItem) -> None:
        self.reads.append(read)
        self.needed += self.stored.length if self.saved is None else read.lengths.numel() * self.itemsize

    @property
    def itemsize(self) -> int:
        return 1 if self.saved is None else self.saved.properties.dtype.itemsize

    @property
    def direct(self) -> bool:
        """Whether the tensor's bytes lie in the file as they are in memory."""
        return self.stored.data is not None

    def ranges(self, verify: bool) -> list[Range]:
        """The byte ranges of the file to read, ascending."""
        stored = self.stored
        if verify and stored.checksums is not None and stored.extent <= BLOCK:
            return [(stored.offset, stored.offset + stored.extent)] if self.needed else []
        if not self.direct:
            wanted = [(0, stored.length)]
        else:
            assert stored.data is not None
            rows = [
                ranges_of(self.shape, self.itemsize, read.storage_offsets, read.lengths)
                for read in self.reads
                if math.prod(read.lengths)
            ]
            wanted = merged([(a + stored.data, b + stored.data) for part in rows for a, b in part.tolist()], MAX_GAP)
        if verify and stored.checksums is not None:
            return merged(stored.block(number)[:2] for number in blocks_of(wanted, BLOCK))
        return [(stored.offset + start, stored.offset + stop) for start, stop in wanted]


@dataclass(slots=True)
class _Group:
    """The pieces of one key. They are read one after the other, so that few tensors are half there at a time."""

    is_tensor: bool
    host_bytes: int
    pieces: list[_Piece] = field(default_factory=list)
    waiting: int = 0  # pieces not committed yet

    @property
    def needed(self) -> int:
        return sum(piece.needed for piece in self.pieces)


@dataclass
class _Job:
    """Pieces that are read together.

    Args:
        begins: host memory that the tensors it begins with will take, in bytes.
        reads: bytes of memory that reading takes while it lasts.
        bytes_read: bytes of files that were read.
    """

    pieces: list[tuple[_Group, _Piece]] = field(default_factory=list)
    begins: int = 0
    reads: int = 0
    bytes_read: int = 0

    @property
    def tiny(self) -> bool:
        """Whether a thread could do little before it needs Python's lock again."""
        return sum(piece.needed for _, piece in self.pieces) <= TINY * len(self.pieces)


class _Ready(NamedTuple):
    """What a read item asked for: a tensor to commit, or an object's bytes."""

    item: ReadItem
    value: torch.Tensor | io.BytesIO


@without_collector
def _groups(items: Sequence[ReadItem], metadata: Metadata, adopting: LoadSink | None) -> list[_Group]:
    """What the plan asks for, by key, in the order in which it lies in the files."""
    groups: dict[str, _Group] = {}
    shapes: dict[str, dict[torch.Size | None, torch.Size]] = {}
    pieces: dict[tuple[str, MetadataIndex], _Piece] = {}
    for item in items:
        key = item.dest_index.fqn
        group = groups.get(key)
        if group is None:
            is_tensor = item.type is LoadItemType.TENSOR
            group = groups[key] = _Group(is_tensor, adopting.buffer_bytes(key) if adopting and is_tensor else 0)
        place = key, item.storage_index
        piece = pieces.get(place)
        if piece is None:
            piece = pieces[place] = _piece(item.storage_index, metadata, shapes)
            group.pieces.append(piece)
            group.waiting += 1
        piece.add(item)
    for group in groups.values():
        group.pieces.sort(key=_position)
    return sorted(groups.values(), key=lambda group: _position(group.pieces[0]))


def _position(piece: _Piece) -> tuple[str, int]:
    return piece.stored.relative_path, piece.stored.offset


def _piece(index: MetadataIndex, metadata: Metadata, shapes: dict[str, dict[torch.Size | None, torch.Size]]) -> _Piece:
    """A saved item. ``shapes`` remembers those of each tensor's chunks."""
    saved = metadata.state_dict_metadata[index.fqn]
    try:
        place = metadata.storage_data[index]
    except KeyError:
        raise CorruptCheckpointError(f"{index.fqn!r} is listed in the checkpoint, but stored in no file") from None
    stored = place if isinstance(place, Stored) else foreign(place)
    if not isinstance(saved, TensorStorageMetadata):
        return _Piece(index.fqn, stored, None, torch.Size())
    if index.fqn not in shapes:
        shapes[index.fqn] = {chunk.offsets: chunk.sizes for chunk in saved.chunks}
    return _Piece(index.fqn, stored, saved, shapes[index.fqn].get(index.offset, saved.size))


def _jobs(groups: Sequence[_Group], remote: bool) -> Iterator[_Job]:
    job, size = _Job(), 0
    for group in groups:
        job.begins += group.host_bytes
        for piece in group.pieces:
            job.pieces.append((group, piece))
            length = piece.stored.extent if piece.needed else 0
            size += length
            # Items of others are unpickled, which copies them twice.
            job.reads += length if piece.direct and remote else 0 if piece.direct else 2 * length
            if size >= _JOB_BYTES or len(job.pieces) >= _JOB_ITEMS:
                yield job
                job, size = _Job(), 0
    if job.pieces:
        yield job


class _Reading:
    """One ``read_data``."""

    def __init__(self, folder: Folder, planner: LoadPlanner, adopting: LoadSink | None, verify: bool, stats: ReadStats):
        self._folder = folder
        self._planner = planner
        self._adopting = adopting
        self._verify = verify
        self._stats = stats
        # Planners of others know of no threads: one call at a time.
        self._planning: AbstractContextManager[Any] = threading.Lock() if adopting is None else nullcontext()

    def run(self, jobs: Iterator[_Job], threads: int, budget: int, progress: Progress) -> None:
        """Read in threads, commit here."""
        used = 0
        running: dict[Future[list[_Ready]], _Job] = {}

        def commit_some() -> int:
            freed = 0
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                freed += job.reads + self._commit(job, future.result(), progress)
            return freed

        with ThreadPoolExecutor(threads, "ShardReader") as pool:
            try:
                for job in jobs:
                    if job.tiny and not self._folder.remote:
                        self._commit(job, self._read(job), progress)
                        continue
                    while running and (used + job.begins + job.reads > budget or len(running) > threads):
                        used -= commit_some()
                    used += job.begins + job.reads
                    running[pool.submit(self._read, job)] = job
                while running:
                    used -= commit_some()
            except BaseException:
                for future in running:
                    future.cancel()
                raise

    def _commit(self, job: _Job, ready: Sequence[_Ready], progress: Progress) -> int:
        """Hand over what a job has read; returns the host bytes of tensors that are complete by now."""
        for one in ready:
            with self._planning:
                if isinstance(one.value, io.BytesIO):
                    self._planner.load_bytes(one.item, one.value)
                else:
                    self._planner.commit_tensor(one.item, one.value)
        self._stats.bytes_read += job.bytes_read
        complete = 0
        for group, piece in job.pieces:
            progress.advance(piece.needed)
            group.waiting -= 1
            if not group.waiting:
                complete += group.host_bytes
                for stored in (done.stored for done in group.pieces if done.stored.extent >= _ADOPT_BYTES):
                    self._folder.forget(stored.relative_path, stored.offset, stored.offset + stored.extent)
        return complete

    def _read(self, job: _Job) -> list[_Ready]:
        pieces = [piece for _, piece in job.pieces]
        ranges = [piece.ranges(self._verify) for piece in pieces]
        windows, numbers = _windows(pieces, ranges)
        views = self._views(windows, pieces, job)
        doubted: set[int] = set()  # numbers of windows that were read a second time
        ready: list[_Ready] = []
        for piece, wanted, number in zip(pieces, ranges, numbers):
            if wanted:
                damage = self._damage(piece, wanted, windows[number], views[number])
                if damage is not None and self._folder.remote and number not in doubted:
                    doubted.add(number)
                    (views[number],) = self._views([windows[number]], pieces, job)
                    first, damage = damage, self._damage(piece, wanted, windows[number], views[number])
                    if damage is None:
                        logger.warning(TRANSIT, self._folder.url, first)
                if damage is not None:
                    raise _corrupt(damage)
                ready += self._fill(piece, windows[number].start, views[number])
            elif piece.saved is None:  # an object of no bytes
                ready += [_Ready(read, io.BytesIO()) for read in piece.reads]
            else:
                ready += [_Ready(read, self._resolve(read)) for read in piece.reads]
        return ready

    def _views(self, windows: Sequence[Window], pieces: Sequence[_Piece], job: _Job) -> list[memoryview]:
        try:
            views = self._folder.view(windows)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._absent(str(error.filename), pieces, "the file is missing") from error
        except (NotAFile, IsADirectoryError) as error:
            raise self._absent(str(error.filename), pieces, NOT_A_FILE) from error
        job.bytes_read += sum(stop - start for window in windows for start, stop in window.parts)
        return views

    def _damage(self, piece: _Piece, wanted: Sequence[Range], window: Window, view: memoryview) -> Damage | None:
        """Compare the bytes of a piece with their checksums; returns those that are not what was written."""
        stored = piece.stored
        end = window.start + len(view)
        if wanted[-1][1] > end:
            return Damage(stored.relative_path, end, wanted[-1][1], (piece.key,), "the file ends before")
        if not self._verify or stored.checksums is None:
            return None
        relative = [(start - stored.offset, stop - stored.offset) for start, stop in wanted]
        for number in blocks_of(relative, BLOCK):
            start, stop, expected = stored.block(number)
            if checksum(view[start - window.start : stop - window.start]) != expected:
                what = "the bytes do not fit their checksum"
                return Damage(stored.relative_path, start, stop, (piece.key,), what)
        return None

    def _fill(self, piece: _Piece, start: int, view: memoryview) -> Iterator[_Ready]:
        """Give what was read to the planner's buffers. ``view`` holds the file's bytes from ``start`` on."""
        stored = piece.stored
        if piece.direct:
            assert stored.data is not None
            source = _Chunk(piece, view, stored.offset + stored.data - start)
            for read in piece.reads:
                yield _Ready(read, self._direct(read, source))
            return
        data = view[stored.offset - start :][: stored.length]
        if piece.saved is None:
            for read in piece.reads:
                yield _Ready(read, self._stream(piece, data))
            return
        tensor = _unpickled(piece, self._stream(piece, data))
        for read in piece.reads:
            region = tuple(slice(start, start + n) for start, n in zip(read.storage_offsets, read.lengths))
            yield _Ready(read, self._copied(read, tensor[region]))

    def _stream(self, piece: _Piece, data: memoryview) -> io.BytesIO:
        extensions = piece.stored.transform_descriptors
        stream = io.BytesIO(data)
        if not extensions:
            return stream
        try:
            return _dcp.untransformed(piece.reads[0], extensions, stream)
        except Exception as error:
            raise CheckpointError(
                f"cannot read {piece.key!r}: it was written through the DCP extensions {', '.join(extensions)} "
                f"({type(error).__name__}: {error}). Read it with DCP's FileSystemReader and its _extension_registry"
            ) from error

    def _direct(self, read: ReadItem, source: _Chunk) -> torch.Tensor:
        if self._adopting is not None and source.nbytes >= _ADOPT_BYTES and source.is_all_of(read):
            whole = source.tensor()
            with self._planning:
                if whole is not None and self._adopting.adopt(read, whole):
                    return whole
        target = self._resolve(read)
        if _is_plain(target) and target.dtype == source.dtype:
            # numpy, because torch would start its threads for every copy, beside ours.
            np.copyto(_as_bits(target), source.region(read), casting="no")
        elif target.numel():
            target.copy_(torch.from_numpy(source.region(read).copy()).view(source.dtype).reshape(target.shape))
        return target

    def _copied(self, read: ReadItem, part: torch.Tensor) -> torch.Tensor:
        target = self._resolve(read)
        if _is_plain(target) and _is_plain(part) and target.dtype == part.dtype:
            np.copyto(_as_bits(target), _as_bits(part), casting="no")
        else:
            target.copy_(part)
        return target

    def _resolve(self, read: ReadItem) -> torch.Tensor:
        with self._planning:
            target = self._planner.resolve_tensor(read).detach()
        if target.shape != read.lengths:
            raise CheckpointError(
                f"the planner gave a buffer of shape {tuple(target.shape)} for a region of shape "
                f"{tuple(read.lengths)} of {read.storage_index.fqn!r}"
            )
        return target

    def _absent(self, name: str, pieces: Sequence[_Piece], what: str) -> CorruptCheckpointError:
        name = os.path.basename(name)
        here = [piece for piece in pieces if os.path.basename(piece.stored.relative_path) == name]
        stop = max((piece.stored.offset + piece.stored.extent for piece in here), default=0)
        keys = tuple(dict.fromkeys(piece.key for piece in here))
        return _corrupt(Damage(name, 0, stop, keys, what))


class _Chunk:
    """A saved chunk whose bytes lie in a buffer, or those of them that are needed.

    Args:
        view: the buffer.
        offset: where the chunk begins in it; negative when its beginning is not there.
    """

    def __init__(self, piece: _Piece, view: memoryview, offset: int):
        assert piece.saved is not None
        self.dtype = piece.saved.properties.dtype
        self._shape = piece.shape
        self._view = view
        self._offset = offset
        strides = [self.dtype.itemsize]
        for extent in reversed(piece.shape[1:]):
            strides.append(strides[-1] * extent)
        self._strides = strides[::-1][: len(piece.shape)]

    @property
    def nbytes(self) -> int:
        return math.prod(self._shape) * self.dtype.itemsize

    def is_all_of(self, read: ReadItem) -> bool:
        return read.lengths == self._shape

    def region(self, read: ReadItem) -> Any:
        """What is read, as an array of bits."""
        offset = self._offset + sum(n * stride for n, stride in zip(read.storage_offsets, self._strides))
        return np.ndarray(tuple(read.lengths), _bits(self.dtype), self._view, offset, self._strides)

    def tensor(self) -> torch.Tensor | None:
        """All of the chunk in the buffer's own memory, if that is aligned for its type."""
        flat = np.ndarray((math.prod(self._shape),), _bits(self.dtype), self._view, self._offset)
        if not (flat.flags.aligned and flat.flags.writeable):
            return None
        return torch.from_numpy(flat).view(self.dtype).view(self._shape)


def _bits(dtype: torch.dtype) -> Any:
    """A numpy type of the same size."""
    return np.dtype(np.complex128) if dtype.itemsize == 16 else np.dtype(f"i{dtype.itemsize}".replace("i1", "u1"))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory on the host is what it shows."""
    on_host = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return on_host and not (tensor.is_conj() or tensor.is_neg())


def _as_bits(tensor: torch.Tensor) -> Any:
    """A host tensor's memory as an array of bits."""
    if tensor.itemsize == 16:
        return tensor.numpy()
    return tensor.view(_BITS[tensor.itemsize]).numpy()


def _unpickled(piece: _Piece, stream: io.BytesIO) -> torch.Tensor:
    """The tensor in an item that another writer made, running nothing.

    Raises:
        UnsafeObjectError: it names something that could run code.
        CorruptCheckpointError: it is no such tensor.
    """
    assert piece.saved is not None
    stored = piece.stored
    try:
        tensor = restricted.load(stream)
    except Refused as error:
        what = ", ".join(error.names) or str(error)
        raise UnsafeObjectError(
            f"refused to load {piece.key!r}: the tensor's item in {stored.relative_path} names something that could "
            f"run code ({what}). Only a tensor of a subclass needs that: if you know it, pass it to "
            "torch.serialization.add_safe_globals; else do not use this checkpoint",
            key=piece.key,
            types=error.names,
        ) from error
    except Exception as error:
        raise _foreign_damage(piece, f"no complete torch.save archive ({type(error).__name__})") from error
    if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.device.type) != (piece.shape, "cpu"):
        raise _foreign_damage(piece, f"no tensor of shape {tuple(piece.shape)}")
    return tensor.detach()


def _foreign_damage(piece: _Piece, what: str) -> CorruptCheckpointError:
    stored = piece.stored
    return _corrupt(Damage(stored.relative_path, stored.offset, stored.offset + stored.length, (piece.key,), what))


def _corrupt(damage: Damage) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the checkpoint is damaged: {damage}. Restore from another checkpoint; verify() names everything that is "
        "damaged in this one, and verify=False loads it as it is",
        [damage],
    )


def _windows(pieces: Sequence[_Piece], ranges: Sequence[Sequence[Range]]) -> tuple[list[Window], list[int]]:
    """Neighbouring pieces' ranges together, and for each piece the number of its window (-1: it needs none)."""
    order = sorted((number for number, wanted in enumerate(ranges) if wanted), key=lambda n: _position(pieces[n]))
    windows: list[tuple[str, int, int, list[Range]]] = []
    numbers = [-1] * len(pieces)
    for number in order:
        name, wanted = pieces[number].stored.relative_path, ranges[number]
        start, stop = wanted[0][0], wanted[-1][1]
        if windows and windows[-1][0] == name and start - windows[-1][2] <= MAX_GAP:
            _, first, last, parts = windows[-1]
            windows[-1] = name, first, max(last, stop), [*parts, *wanted]
        else:
            windows.append((name, start, stop, list(wanted)))
        numbers[number] = len(windows) - 1
    return [Window(name, a, b, tuple(merged(parts, MAX_GAP))) for name, a, b, parts in windows], numbers

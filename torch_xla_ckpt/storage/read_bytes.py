"""The bytes of a read job: read, checked, and handed to the planner or sink that asked for them."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch.distributed.checkpoint.planner import ReadItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, Damage, UnsafeObjectError
from torch_xla_ckpt.protocols import Folder, Window
from torch_xla_ckpt.serialization import Archive, ArchiveError, Refused, restricted
from torch_xla_ckpt.storage.chunk_bytes import ChunkBytes
from torch_xla_ckpt.storage.file_errors import NOT_A_FILE, TRANSIT, NotAFile
from torch_xla_ckpt.storage.ranges import MAX_GAP, Range, blocks_of
from torch_xla_ckpt.storage.read_plan import ItemRead, ReadJob, windows_of
from torch_xla_ckpt.storage.read_target import ReadResult, ReadTarget
from torch_xla_ckpt.storage.stored import BLOCK, checksum

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENDS_EARLY = "the file ends before these bytes"
BAD_CHECKSUM = "the bytes do not match their checksum"
MISSING = "the file is missing"


@dataclass
class FetchedJob:
    """A job whose bytes are here, and not checked yet.

    Args:
        job: the job.
        items: its items.
        ranges: for each item, the byte ranges to read.
        windows: the windows of the files that hold these ranges.
        numbers: for each item, the number of its window; -1 if the item needs no bytes.
        views: the bytes of each window.
        reread: the numbers of windows that were read a second time.
    """

    job: ReadJob
    items: Sequence[ItemRead]
    ranges: Sequence[Sequence[Range]]
    windows: Sequence[Window]
    numbers: Sequence[int]
    views: list[memoryview]
    reread: set[int] = field(default_factory=set)


class JobReader:
    """Reads jobs, in any thread: ``fetch`` waits for bytes, and ``deliver`` works with them.

    Args:
        folder: the checkpoint's folder.
        target: receives the elements and objects.
        verify: check what is read against the manifest's checksums.
    """

    def __init__(self, folder: Folder, target: ReadTarget, verify: bool):
        self._folder = folder
        self._target = target
        self._verify = verify

    def _gap(self, items: Sequence[ItemRead]) -> int:
        """Return the gap in bytes up to which two ranges of a file are read as one.

        A memory map reads no bytes between two ranges, so joining them only helps where whole blocks may be checked.
        """
        has_checksums = any(item.stored.checksums is not None for item in items)
        return MAX_GAP if self._folder.remote or has_checksums else 0

    def fetch(self, job: ReadJob) -> FetchedJob:
        """Read the bytes of a job.

        Raises:
            CorruptCheckpointError: a file is missing.
        """
        items = [item for _, item in job.items]
        gap = self._gap(items)
        ranges = [item.ranges(self._verify, gap) for item in items]
        windows, numbers = windows_of(items, ranges, gap)
        views = self._first_views(job, items, ranges, windows, numbers)
        return FetchedJob(job, items, ranges, windows, numbers, views)

    def deliver(self, fetched: FetchedJob) -> list[ReadResult]:
        """Check the bytes of a job, and hand them to the target. Return what is still to be committed.

        Raises:
            CorruptCheckpointError: bytes are not what was written.
            UnsafeObjectError: a tensor's item names something that could run code.
        """
        results: list[ReadResult] = []
        for item, wanted, number in zip(fetched.items, fetched.ranges, fetched.numbers):
            if item.stored.inline is not None:
                results += self._filled(item, item.stored.offset, memoryview(item.stored.inline))
                continue
            if not wanted:
                results += self._without_bytes(item)
                continue
            self._require_intact(item, wanted, number, fetched)
            results += self._filled(item, fetched.windows[number].start, fetched.views[number])
        return results

    def abort(self) -> None:
        """Let calls in other threads end soon, because the load has failed."""

    def _first_views(
        self,
        job: ReadJob,
        items: Sequence[ItemRead],
        ranges: Sequence[Sequence[Range]],
        windows: Sequence[Window],
        numbers: Sequence[int],
    ) -> list[memoryview]:
        """Return the bytes of each window.

        Args:
            job: the job.
            items: its items.
            ranges: for each item, the byte ranges to read.
            windows: the windows.
            numbers: for each item, the number of its window; -1 if the item needs no bytes.
        """
        return self._views(windows, items, job)

    def _require_intact(self, item: ItemRead, wanted: Sequence[Range], number: int, fetched: FetchedJob) -> None:
        """Compare bytes of an item with their checksums. Read a window of a store a second time if they differ.

        Args:
            item: the item.
            wanted: the byte ranges to check.
            number: the number of the item's window.
            fetched: the job. Bytes that are read again are put into its views.

        Raises:
            CorruptCheckpointError: the bytes are not what was written.
        """
        window, views = fetched.windows[number], fetched.views
        damage = self._damage(item, wanted, window, views[number])
        if damage is not None and self._folder.remote and number not in fetched.reread:
            fetched.reread.add(number)
            (views[number],) = self._views([window], fetched.items, fetched.job)
            first, damage = damage, self._damage(item, wanted, window, views[number])
            if damage is None:
                logger.warning(TRANSIT, self._folder.url, first)
        if damage is not None:
            raise corrupt(damage)

    def _views(self, windows: Sequence[Window], items: Sequence[ItemRead], job: ReadJob) -> list[memoryview]:
        try:
            views = asked_again_if_missing(self._folder, lambda: self._folder.view(windows))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _unreadable_file(str(error.filename), items, MISSING) from error
        except (NotAFile, IsADirectoryError) as error:
            raise _unreadable_file(str(error.filename), items, NOT_A_FILE) from error
        job.bytes_read += sum(stop - start for window in windows for start, stop in window.parts)
        return views

    def _damage(self, item: ItemRead, wanted: Sequence[Range], window: Window, view: memoryview) -> Damage | None:
        """Compare an item's bytes with their checksums. Return the first block that differs, or None."""
        stored = item.stored
        end = window.start + len(view)
        if wanted[-1][1] > end:
            return Damage(stored.relative_path, end, wanted[-1][1], (item.key,), ENDS_EARLY)
        if not self._verify or stored.checksums is None:
            return None
        if stored.blocks == 1:
            first = stored.offset - window.start
            if checksum(view[first : first + stored.extent]) != stored.checksums:
                stop = stored.offset + stored.extent
                return Damage(stored.relative_path, stored.offset, stop, (item.key,), BAD_CHECKSUM)
            return None
        relative = [(start - stored.offset, stop - stored.offset) for start, stop in wanted]
        for number in blocks_of(relative, BLOCK):
            start, stop, expected = stored.block(number)
            if checksum(view[start - window.start : stop - window.start]) != expected:
                return Damage(stored.relative_path, start, stop, (item.key,), BAD_CHECKSUM)
        return None

    def _without_bytes(self, item: ItemRead) -> list[ReadResult]:
        """Answer the requests for an item of which no byte is needed."""
        if item.saved is None:
            return [ReadResult(request, io.BytesIO()) for request in item.requests]
        dtype = item.saved.properties.dtype
        return _to_commit(
            self._target.fill_from(request, torch.empty(request.lengths, dtype=dtype)) for request in item.requests
        )

    def _filled(self, item: ItemRead, start: int, view: memoryview) -> list[ReadResult]:
        """Answer the requests for an item. ``view`` holds the file's bytes from position ``start`` on."""
        stored = item.stored
        if stored.data is not None:
            chunk = ChunkBytes(item, view, stored.offset + stored.data - start)
            return _to_commit([self._target.fill(request, chunk) for request in item.requests])
        data = view[stored.offset - start :][: stored.length]
        stream = _stream(item, data)
        if self._verify and stored.checksums is None:
            _require_crc(item, stream)
        if item.saved is None:
            return [ReadResult(request, _stream(item, data)) for request in item.requests]
        tensor = _unpickled(item, stream)
        return _to_commit(self._target.fill_from(request, _region(tensor, request)) for request in item.requests)


def asked_again_if_missing(folder: Folder, ask: Callable[[], T]) -> T:
    """Return what ``ask`` returns. If a store says that a file is missing, ask it a second time.

    Args:
        folder: the file's folder.
        ask: asks for the file, or for its size.

    Raises:
        FileNotFoundError: the file is missing.
    """
    try:
        return ask()
    except FileNotFoundError as error:
        if not folder.remote:
            raise
        answer = ask()
        logger.warning(TRANSIT, folder.url, f"{os.path.basename(str(error.filename))}: {MISSING}")
        return answer


def _to_commit(results: Iterable[ReadResult | None]) -> list[ReadResult]:
    return [result for result in results if result is not None]


def _region(tensor: torch.Tensor, request: ReadItem) -> torch.Tensor:
    """Return the requested region of a saved chunk."""
    return tensor[tuple(slice(at, at + n) for at, n in zip(request.storage_offsets, request.lengths))]


def corrupt(damage: Damage) -> CorruptCheckpointError:
    """Return the error for damage that a load has met."""
    return CorruptCheckpointError(
        f"the checkpoint is damaged: {damage}. Restore from another checkpoint. verify() lists all damage in this "
        "checkpoint; in Python, verify=False loads it without checking",
        [damage],
    )


def _unreadable_file(path: str, items: Sequence[ItemRead], problem: str) -> CorruptCheckpointError:
    """Return the error for a data file that cannot be opened, with the keys of the items in it."""
    name = os.path.basename(path)
    inside = [item for item in items if os.path.basename(item.stored.relative_path) == name]
    stop = max((item.stored.offset + item.stored.extent for item in inside), default=0)
    keys = tuple(dict.fromkeys(item.key for item in inside))
    return corrupt(Damage(name, 0, stop, keys, problem))


def _stream(item: ItemRead, data: memoryview) -> io.BytesIO:
    """Return an item's bytes as they were before DCP's extensions."""
    extensions = item.stored.transform_descriptors
    stream = io.BytesIO(data)
    if not extensions:
        return stream
    try:
        return _dcp.untransformed(item.requests[0], extensions, stream)
    except Exception as error:
        raise CheckpointError(
            f"cannot read {item.key!r}: it was written through the DCP extensions {', '.join(extensions)} "
            f"({type(error).__name__}: {error}). Read it with DCP's FileSystemReader and its _extension_registry"
        ) from error


def _require_crc(item: ItemRead, stream: io.BytesIO) -> None:
    """Compare the records of an archive with their CRC-32. An item that is no archive has none.

    Raises:
        CorruptCheckpointError: a record differs.
    """
    try:
        misfits, _ = Archive(stream.getbuffer()).check()
    except ArchiveError:
        return
    if misfits:
        raise _wrong_item(item, f"the record {misfits[0]} does not match its CRC-32")


def _unpickled(item: ItemRead, stream: io.BytesIO) -> torch.Tensor:
    """Return the tensor in an item that only ``torch.load`` can read, without running code from it.

    Raises:
        UnsafeObjectError: the item names something that could run code.
        CorruptCheckpointError: the item holds no tensor of the chunk's shape.
    """
    stored = item.stored
    try:
        tensor = restricted.load(stream)
    except Refused as error:
        what = ", ".join(error.names) or str(error)
        raise UnsafeObjectError(
            f"refused to load {item.key!r}: the tensor's item in {stored.relative_path} names something that could "
            f"run code ({what}). Only a tensor of a subclass needs that. If you know the subclass, pass it to "
            "torch.serialization.add_safe_globals. Otherwise do not use this checkpoint",
            key=item.key,
            types=error.names,
        ) from error
    except Exception as error:
        raise _wrong_item(item, f"the item is no complete torch.save archive ({type(error).__name__})") from error
    if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.device.type) != (item.shape, "cpu"):
        raise _wrong_item(item, f"the item holds no tensor of shape {tuple(item.shape)}")
    return tensor.detach()


def _wrong_item(item: ItemRead, problem: str) -> CorruptCheckpointError:
    stored = item.stored
    return corrupt(Damage(stored.relative_path, stored.offset, stored.offset + stored.length, (item.key,), problem))

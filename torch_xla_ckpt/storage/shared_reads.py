"""Reading together with other ranks: this rank's needs, its jobs, and bytes that come from or go to other ranks.

A rank checks what it reads before it passes bytes on. What it gets is checked again, like everything that is read.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.cooperation import Exchange, Needs, Parcel, RoundOfMessages, Share
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Folder, Window
from torch_xla_ckpt.storage.ranges import MAX_GAP, Range, merged
from torch_xla_ckpt.storage.read_bytes import FetchedJob, JobReader
from torch_xla_ckpt.storage.read_plan import ItemRead, KeyReads, ReadJob
from torch_xla_ckpt.storage.read_target import ReadResult, ReadTarget

logger = logging.getLogger(__name__)

Position = tuple[str, int]
"""A file's name and an item's first byte in the file."""

_GAP = 8 << 10  # bytes between two ranges up to which they are read as one; other ranks may read them too
_NAMED = 3  # keys that an error names
_NO_ROUND = -1  # the round of items that need no bytes of a file


def needs_of(
    reads: Sequence[KeyReads], metadata: Metadata, verify: bool, memory_budget: int
) -> tuple[Needs, list[Position]]:
    """Return what this rank needs of the data files, and the position of each item in it.

    Args:
        reads: the reads of each key.
        metadata: DCP's metadata of the checkpoint, the same on all ranks.
        verify: whether checksums are verified.
        memory_budget: the rank's memory budget in bytes.
    """
    keys = {key: number for number, key in enumerate(metadata.state_dict_metadata)}
    items = [(one.is_tensor, item) for one in reads for item in one.items if _needs_bytes(item)]
    rows = [(is_tensor, keys[item.key], *item.position) for is_tensor, item in items]
    ranges = [item.ranges(verify, MAX_GAP) for _, item in items]
    return Needs.of(rows, ranges, memory_budget), [item.position for _, item in items]


def shared_jobs(reads: Sequence[KeyReads], plan: SharedPlan, remote: bool) -> Iterator[ReadJob]:
    """Cut the reads into one job for each round, in the order of the rounds.

    Args:
        reads: the reads of each key.
        plan: this rank's part of reading together.
        remote: whether the bytes of a job are held in memory while it runs.
    """
    by_round: dict[int, list[tuple[KeyReads, ItemRead]]] = defaultdict(list)
    for key_reads in reads:
        for item in key_reads.items:
            by_round[plan.round_of(item)].append((key_reads, item))
    begun: set[int] = set()
    for number, items in sorted(by_round.items(), key=lambda entry: entry[0]):
        parcels = plan.parcels.get(number, [])
        job = ReadJob(items, round=number, working_bytes=sum(parcel.nbytes for parcel in parcels))
        for key_reads, item in items:
            if id(key_reads) not in begun:
                begun.add(id(key_reads))
                job.buffer_bytes += key_reads.buffer_bytes
            length = item.stored.extent if item.needed_bytes else 0
            if not item.is_plain_tensor:
                job.working_bytes += 2 * length  # unpickling copies the bytes twice
            elif remote or parcels:
                job.working_bytes += length
        yield job


class SharedPlan:
    """This rank's part of reading together, by item and by round.

    Args:
        share: the rank's part, as the coordinator assigned it.
        positions: the positions of the items of the rank's needs.
    """

    def __init__(self, share: Share, positions: Sequence[Position]):
        self._rounds = dict(zip(positions, share.rounds.tolist()))
        self.parcels: Mapping[int, list[Parcel]] = defaultdict(list)
        for parcel in share.parcels:
            self.parcels[parcel.round].append(parcel)

    def round_of(self, item: ItemRead) -> int:
        """Return the round in which an item is read."""
        return self._rounds[item.position] if _needs_bytes(item) else _NO_ROUND


class SharedJobReader(JobReader):
    """Reads jobs together with other ranks, in any thread.

    Args:
        folder, target, verify: as for ``JobReader``.
        exchange: the connections to the other ranks.
        plan: this rank's part of reading together.
    """

    def __init__(self, folder: Folder, target: ReadTarget, verify: bool, exchange: Exchange, plan: SharedPlan):
        super().__init__(folder, target, verify)
        self._exchange = exchange
        self._plan = plan
        self._messages: dict[int, RoundOfMessages] = {}

    def abort(self) -> None:
        self._exchange.abort()

    def fetch(self, job: ReadJob) -> FetchedJob:
        """Read the bytes of a job as ``JobReader`` does. Pass on what other ranks need, and take what they pass on.

        Raises:
            OtherRankError: another rank failed or left.
        """
        if parcels := self._plan.parcels.get(_round_of(job)):
            self._messages[_round_of(job)] = RoundOfMessages(self._exchange, parcels)
        return super().fetch(job)

    def deliver(self, fetched: FetchedJob) -> list[ReadResult]:
        """Check the bytes of a job as ``JobReader`` does, and wait until other ranks have what they need of them.

        Raises:
            OtherRankError: another rank failed or left.
        """
        results = super().deliver(fetched)
        messages = self._messages.pop(_round_of(fetched.job), None)
        if messages is not None:
            messages.finish()  # a planner may use the memory for something else after the commit
        return results

    def _gap(self, items: Sequence[ItemRead]) -> int:
        return MAX_GAP  # the same as in ``needs_of``

    def _first_views(
        self,
        job: ReadJob,
        items: Sequence[ItemRead],
        ranges: Sequence[Sequence[Range]],
        windows: Sequence[Window],
        numbers: Sequence[int],
    ) -> list[memoryview]:
        messages = self._messages.get(_round_of(job))
        if messages is None:
            return super()._first_views(job, items, ranges, windows, numbers)
        incoming = _by_file(messages.incoming)
        own = [_without(wanted, incoming.get(item.position[0], ())) for item, wanted in zip(items, ranges)]
        parts: list[list[Range]] = [[] for _ in windows]
        for mine, number in zip(own, numbers):
            if mine:
                parts[number] += mine
        own_windows = [
            Window(window.name, window.start, window.stop, tuple(merged(part, _GAP)))
            for window, part in zip(windows, parts)
        ]
        views = self._own_views(job, items, own, own_windows, numbers)
        outgoing = {parcel.number: _writable(_bytes(parcel, windows, views)) for parcel in messages.outgoing}
        messages.send(outgoing)
        self._make_room(messages.incoming, own_windows, views)
        arrays = {parcel.number: _bytes(parcel, windows, views) for parcel in messages.incoming}
        messages.receive(arrays)
        for parcel in messages.received():
            logger.warning(
                "bytes %s to %s of %s did not arrive as another rank sent them, and are read from %s instead",
                f"{parcel.start:,}",
                f"{parcel.stop:,}",
                parcel.file,
                self._folder.url,
            )
            whole = Window(parcel.file, parcel.start, parcel.stop, ((parcel.start, parcel.stop),))
            (view,) = self._views([whole], items, job)
            arrays[parcel.number][: len(view)] = np.frombuffer(view, dtype=np.uint8)
        job.bytes_received += sum(parcel.nbytes for parcel in messages.incoming)
        return views

    def _own_views(
        self,
        job: ReadJob,
        items: Sequence[ItemRead],
        own: Sequence[Sequence[Range]],
        windows: Sequence[Window],
        numbers: Sequence[int],
    ) -> list[memoryview]:
        """Read and check what this rank reads itself.

        Raises:
            CorruptCheckpointError: the bytes are not what was written.
            CheckpointError: the bytes cannot be read. The error names keys.
        """
        try:
            fetched = FetchedJob(job, items, own, windows, numbers, self._views(windows, items, job))
            for item, wanted, number in zip(items, own, numbers):
                if wanted:
                    self._require_intact(item, wanted, number, fetched)
        except CheckpointError:
            raise
        except Exception as error:
            keys = list(dict.fromkeys(item.key for item, wanted in zip(items, own) if wanted))
            more = f" and {len(keys) - _NAMED} more keys" if len(keys) > _NAMED else ""
            raise CheckpointError(
                f"cannot read {', '.join(map(repr, keys[:_NAMED]))}{more}: {type(error).__name__}: {error}"
            ) from error
        return fetched.views

    def _make_room(self, parcels: Sequence[Parcel], windows: Sequence[Window], views: list[memoryview]) -> None:
        """Put windows that get bytes from other ranks into memory that may be written to."""
        for number, window in enumerate(windows):
            is_shared = any(_is_inside(parcel, window) for parcel in parcels)
            if not is_shared or (self._folder.remote and not views[number].readonly):
                continue
            array = np.empty(window.stop - window.start, dtype=np.uint8)
            for start, stop in window.parts:
                part = views[number][start - window.start : stop - window.start]
                array[start - window.start :][: len(part)] = np.frombuffer(part, dtype=np.uint8)
            views[number] = array.data


def _round_of(job: ReadJob) -> int:
    return _NO_ROUND if job.round is None else job.round


def _needs_bytes(item: ItemRead) -> bool:
    """Whether bytes of a file are needed. An empty item may have the position of another one."""
    return item.stored.inline is None and item.needed_bytes > 0


def _by_file(parcels: Sequence[Parcel]) -> dict[str, list[Range]]:
    """Return the byte ranges of parcels by file, ascending."""
    ranges: dict[str, list[Range]] = defaultdict(list)
    for parcel in sorted(parcels, key=lambda parcel: parcel.start):
        ranges[parcel.file].append((parcel.start, parcel.stop))
    return ranges


def _without(wanted: Sequence[Range], taken: Sequence[Range]) -> list[Range]:
    """Return the parts of ``wanted`` outside of ``taken``. Both are ascending."""
    if not taken:
        return list(wanted)
    result = []
    for start, stop in wanted:
        for first, last in taken:
            if last <= start:
                continue
            if first >= stop:
                break
            if start < first:
                result.append((start, first))
            start = last
        if start < stop:
            result.append((start, stop))
    return result


def _is_inside(parcel: Parcel, window: Window) -> bool:
    return parcel.file == window.name and window.start <= parcel.start and parcel.stop <= window.stop


def _bytes(parcel: Parcel, windows: Sequence[Window], views: Sequence[memoryview]) -> np.ndarray[Any, Any]:
    """Return the bytes of a parcel in the window that has them. All bytes of a parcel are in one window."""
    number = next(number for number, window in enumerate(windows) if _is_inside(parcel, window))
    start = windows[number].start
    return np.frombuffer(views[number], dtype=np.uint8)[parcel.start - start : parcel.stop - start]


def _writable(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return bytes that torch accepts as a tensor."""
    return data if data.flags.writeable else data.copy()

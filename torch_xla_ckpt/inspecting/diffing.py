"""diff: which keys two checkpoints have, and by how much their values differ."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import UnsafeObjectError
from torch_xla_ckpt.inspecting.contents import select
from torch_xla_ckpt.inspecting.equality import compared, equal
from torch_xla_ckpt.inspecting.folding import Fold, fold
from torch_xla_ckpt.inspecting.objects import object_text
from torch_xla_ckpt.inspecting.opening import open_checkpoint
from torch_xla_ckpt.inspecting.reading import Values, cut
from torch_xla_ckpt.inspecting.text import plural, shown, table
from torch_xla_ckpt.inspecting.words import entry_words
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.reports import format_bytes
from torch_xla_ckpt.serialization import decode
from torch_xla_ckpt.storage import PathLike, Stored

Status = Literal["equal", "differs", "other shape", "other dtype", "other type", "only in a", "only in b"]
_SLAB_BYTES = 64 << 20  # large slabs, so that few blocks are read twice where the chunks differ
_SMALL = 1 << 20  # mean size in bytes of chunks below which they are not read one by one


@dataclass(frozen=True)
class KeyDifference:
    """One key of two checkpoints.

    Args:
        key: the key.
        status: "equal": all bits are the same. "differs": some are not. "other shape", "other dtype", "other type": the
            values cannot be compared; "other type" is a tensor against an object. "only in a", "only in b".
        a, b: the value in each checkpoint, in words; "" where a checkpoint lacks the key.
        share: share of the elements that differ, between 0 and 1; None unless the status is "differs" or "equal".
        max_abs: largest absolute difference of two elements, as an exact int for integers; NaN if one of them is NaN,
            or if torch cannot compute with the dtype. None for objects, and unless the status is "differs".
    """

    key: str
    status: Status
    a: str = ""
    b: str = ""
    share: float | None = None
    max_abs: float | None = None


@dataclass(frozen=True)
class Difference:
    """The differences of two checkpoints. ``bool`` is True if they differ; ``print`` shows a table.

    Args:
        a, b: the folders of the checkpoints.
        keys: every key of either checkpoint.
        bytes_read: bytes read from data files of both. Equal chunks are told by their checksums, and not read.
        bytes_compared: bytes of the values that were compared by reading them.
    """

    a: str
    b: str
    keys: tuple[KeyDifference, ...]
    bytes_read: int
    bytes_compared: int

    @property
    def same(self) -> bool:
        """Whether both checkpoints have the same keys, with the same bits."""
        return all(one.status == "equal" for one in self.keys)

    def __bool__(self) -> bool:
        return not self.same

    def text(self, *, every: bool = False) -> str:
        """Return a table of the keys that differ.

        Args:
            every: give each key a line of its own, equal keys too. Default: keys that differ only in numbers share a
                line, which has the largest numbers of its keys.
        """
        lines = [f"a: {shown(self.a)}", f"b: {shown(self.b)}"]
        unequal = [one for one in self.keys if one.status != "equal"]
        folded = (
            [Fold(one.key, (one,)) for one in self.keys]
            if every
            else fold(unequal, lambda one: one.key, lambda one: (one.status, one.a, one.b))
        )
        rows = [
            (line.members[0].status, _percent(line.members), _largest(line.members), _both(line.members[0]), line.name)
            for line in folded
        ]
        if rows:
            lines.append(table(("", "elements", "max abs", "a -> b", "key"), rows, {1, 2}))
        equal = sum(one.status == "equal" for one in self.keys)
        lines.append(
            f"{plural(equal, 'key')} equal, {len(self.keys) - equal:,} not; read {format_bytes(self.bytes_read)}"
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def diff(
    a: PathLike,
    b: PathLike,
    *patterns: str,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Difference:
    """Compare two checkpoints: their keys, shapes and dtypes, and the bits of their values.

    Chunks that both checkpoints cut alike are compared by their checksums, and read only if those differ. Other tensors
    are read in slabs.

    Args:
        a, b: two checkpoints, as for ``inspect``.
        patterns: globs of the keys to compare. Default: all keys.
        storage_options: options of the fsspec filesystem behind URLs, for both. Default: none.
        progress: called with the bytes just compared and the bytes of all tensors that both have. Default: not called.

    Raises:
        CheckpointError: there is no checkpoint at a path.
        CorruptCheckpointError: a checkpoint is damaged.
    """
    first, second = open_checkpoint(a, storage_options), open_checkpoint(b, storage_options)
    comparison = _Comparison(Values(first), Values(second), progress)
    entries = comparison.a.metadata.state_dict_metadata, comparison.b.metadata.state_dict_metadata
    keys = select(list(dict.fromkeys([*entries[0], *entries[1]])), str, patterns)
    found = comparison.all(keys)
    read = comparison.a.bytes_read + comparison.b.bytes_read
    return Difference(first.location.url, second.location.url, found, read, comparison.bytes_compared)


@dataclass
class _Tally:
    """What was found so far of the elements of one tensor that are read."""

    differing: int = 0
    largest: float = 0.0

    def add(self, differing: int, largest: float) -> None:
        self.differing += differing
        self.largest = math.nan if math.isnan(largest) or math.isnan(self.largest) else max(largest, self.largest)


class _Comparison:
    """Compares the values of two checkpoints."""

    def __init__(self, a: Values, b: Values, progress: Callable[[int, int], object] | None):
        self.a = a
        self.b = b
        self.bytes_compared = 0
        self._progress = progress
        self._total = 0

    def all(self, keys: Sequence[str]) -> tuple[KeyDifference, ...]:
        """Compare the values of some keys. The next elements are read while the last ones are compared."""
        if self._progress is not None:
            tensors = (self.a.metadata.state_dict_metadata.get(key) for key in keys)
            self._total = sum(_nbytes(one) for one in tensors if isinstance(one, TensorStorageMetadata))
        known = {key: self._without_reading(key) for key in keys}
        unread = {key: self._unequal_boxes(key) for key, one in known.items() if one is None}
        tallies = {key: _Tally() for key in unread}
        slabs = (
            (key, slab)
            for key, boxes in unread.items()
            for box in boxes
            for slab in cut(box, self.a.saved_tensor(key).properties.dtype.itemsize, _SLAB_BYTES)
        )
        for key, a, b in self._read(slabs):
            tallies[key].add(*compared(a, b))
            self.bytes_compared += a.nbytes
            self._advance(a.nbytes)
        return tuple(one or self._difference(key, tallies[key]) for key, one in known.items())

    def _read(self, slabs: Iterable[tuple[str, Box]]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield the elements of slabs in both checkpoints. Each checkpoint is read by a thread of its own."""
        ahead: deque[tuple[str, Future[torch.Tensor], Future[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(1) as a_reads, ThreadPoolExecutor(1) as b_reads:
            for name, slab in slabs:
                reads = a_reads.submit(self.a.tensor, name, slab), b_reads.submit(self.b.tensor, name, slab)
                ahead.append((name, *reads))
                if len(ahead) > 1:
                    key, a, b = ahead.popleft()
                    yield key, a.result(), b.result()
            for key, a, b in ahead:
                yield key, a.result(), b.result()

    def _without_reading(self, key: str) -> KeyDifference | None:
        """Return how a value differs; None for a tensor whose elements must be compared."""
        a, b = (values.metadata.state_dict_metadata.get(key) for values in (self.a, self.b))
        if a is None or b is None:
            return KeyDifference(key, "only in b" if a is None else "only in a", entry_words(a), entry_words(b))
        if isinstance(a, TensorStorageMetadata) != isinstance(b, TensorStorageMetadata):
            return KeyDifference(key, "other type", entry_words(a), entry_words(b))
        if not isinstance(a, TensorStorageMetadata) or not isinstance(b, TensorStorageMetadata):
            return self._objects(key)
        if a.size != b.size:
            return KeyDifference(key, "other shape", entry_words(a), entry_words(b))
        if a.properties.dtype != b.properties.dtype:
            return KeyDifference(key, "other dtype", entry_words(a), entry_words(b))
        return None

    def _objects(self, key: str) -> KeyDifference:
        places = self.a.stored(key), self.b.stored(key)
        if _same_bytes(*places):
            return KeyDifference(key, "equal", share=0.0)
        streams = self.a.object_bytes(key), self.b.object_bytes(key)
        if streams[0].getvalue() == streams[1].getvalue():
            return KeyDifference(key, "equal", share=0.0)
        try:
            values = [decode(key, stream, (), False) for stream in streams]
        except UnsafeObjectError:
            return KeyDifference(key, "differs", f"{places[0].length} bytes", f"{places[1].length} bytes")
        # The same value may have several pickles: strings are shared, or they are not.
        if equal(*values):
            return KeyDifference(key, "equal", share=0.0)
        return KeyDifference(key, "differs", object_text(values[0])[:60], object_text(values[1])[:60])

    def _unequal_boxes(self, key: str) -> list[Box]:
        """Return the boxes of a tensor that no checksums prove equal."""
        a, b = self.a.saved_tensor(key), self.b.saved_tensor(key)
        chunks = [_boxes(a), _boxes(b)]
        if set(chunks[0]) != set(chunks[1]):
            return [Box.whole(a.size)]
        boxes = [box for box in chunks[0] if not self._has_same_bytes(key, box)]
        if boxes and _nbytes(a) < _SMALL * len(chunks[0]):
            boxes = [Box.whole(a.size)]
        self._advance(_nbytes(a) - sum(box.volume for box in boxes) * a.properties.dtype.itemsize)
        return boxes

    def _difference(self, key: str, tally: _Tally) -> KeyDifference:
        if not tally.differing:
            return KeyDifference(key, "equal", share=0.0)
        total = math.prod(self.a.saved_tensor(key).size)
        return KeyDifference(key, "differs", share=tally.differing / total, max_abs=tally.largest)

    def _has_same_bytes(self, key: str, box: Box) -> bool:
        offsets = torch.Size(box.offsets)
        return _same_bytes(self.a.stored(key, offsets), self.b.stored(key, offsets))

    def _advance(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress(nbytes, self._total)


def _same_bytes(a: Stored, b: Stored) -> bool:
    """Return whether checksums prove that two items have the same bytes."""
    return a.checksums is not None and (a.length, a.data, a.checksums) == (b.length, b.data, b.checksums)


def _boxes(saved: TensorStorageMetadata) -> list[Box]:
    return [_dcp.box_of(chunk) for chunk in saved.chunks]


def _nbytes(saved: TensorStorageMetadata) -> int:
    return math.prod(saved.size) * saved.properties.dtype.itemsize


def _both(one: KeyDifference) -> str:
    return f"{one.a} -> {one.b}" if one.a and one.b else one.a or one.b


def _percent(members: Sequence[KeyDifference]) -> str:
    shares = [one.share for one in members if one.share is not None]
    return f"{max(shares):.2%}" if shares else ""


def _largest(members: Sequence[KeyDifference]) -> str:
    found = [one.max_abs for one in members if one.max_abs is not None]
    if not found or any(map(math.isnan, found)):
        return "nan" if found else ""
    largest = max(found)
    return str(largest) if isinstance(largest, int) else f"{largest:.4g}"

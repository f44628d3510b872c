"""Reads that fill the boxes of tensors from saved chunks, with the proof that they fill every element once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Box, ChunkIndex, Flaw, covers_exactly, find_flaws

_KEPT = 32  # cuts that are remembered; a model of many layers has few


class TensorReads(NamedTuple):
    """The reads of one tensor.

    Args:
        items: the reads.
        flaws: regions of the boxes that the saved chunks do not hold exactly once; empty if the proof succeeded.
        resharded: whether the boxes differ from the saved chunks.
    """

    items: list[ReadItem]
    flaws: list[Flaw]
    resharded: bool


class _BoxFill(NamedTuple):
    """How the chunks of a saved tensor fill a box, whatever the tensor's key.

    Args:
        box: the box.
        moves: the transfers; none if the chunks do not hold every element exactly once.
        flaws: regions that they do not hold exactly once.
        is_chunk: whether the box is one of the chunks.
    """

    box: Box
    moves: list[_dcp.Transfer]
    flaws: Sequence[Flaw]
    is_chunk: bool


class ReadPlanner:
    """Plans reads of one saved tensor. The chunks are indexed once, when the first reads are planned.

    Args:
        key: key in the target.
        source: key in the checkpoint.
        saved: the checkpoint's entry for ``source``.
    """

    def __init__(self, key: str, source: str, saved: TensorStorageMetadata):
        self._key = key
        self._source = source
        self._saved = saved
        self._index: ChunkIndex | None = None

    def plan(self, boxes: Sequence[Box]) -> TensorReads:
        """Plan the reads that fill ``boxes``, the distinct boxes that this process needs."""
        if _dcp.is_one_chunk(self._saved):
            return _whole_reads(self._key, self._source, boxes, self._saved)
        if self._index is None:
            self._index = ChunkIndex(_dcp.boxes_of(self._saved))
        return _reads(self._key, self._source, [_fill(box, self._index) for box in boxes])


class ReadPlans:
    """Plans reads of many saved tensors. Tensors that are cut alike, as those of a model's layers, share one proof."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[_BoxFill]] = {}

    def plan(self, key: str, source: str, boxes: Sequence[Box], saved: TensorStorageMetadata) -> TensorReads:
        """Plan the reads that fill ``boxes``.

        Args:
            key: key in the target.
            source: key in the checkpoint.
            boxes: the distinct boxes that this process needs.
            saved: the checkpoint's entry for ``source``.
        """
        if _dcp.is_one_chunk(saved):
            return _whole_reads(key, source, boxes, saved)
        cut = (tuple(boxes), _dcp.geometry(saved))
        fills = self._known.get(cut)
        if fills is None:
            index = ChunkIndex(_dcp.boxes_of(saved))
            if len(self._known) == _KEPT:
                del self._known[next(iter(self._known))]
            fills = self._known[cut] = [_fill(box, index) for box in boxes]
        return _reads(key, source, fills)


def _fill(box: Box, index: ChunkIndex) -> _BoxFill:
    numbers, overlaps = index.overlaps(box)
    if not covers_exactly(box, overlaps):
        return _BoxFill(box, [], find_flaws(box, overlaps), False)
    chunks = index.chunks.take(numbers)
    moves = _dcp.transfers(box, chunks, overlaps)
    return _BoxFill(box, moves, (), len(numbers) == 1 and chunks[0].sizes == box.sizes)


def _reads(key: str, source: str, fills: Sequence[_BoxFill]) -> TensorReads:
    reads = _dcp.TensorReads(key, source)
    items = [item for fill in fills for item in reads.fill(fill.box, fill.moves)]
    flaws = [flaw for fill in fills for flaw in fill.flaws]
    return TensorReads(items, flaws, any(not fill.is_chunk and not fill.flaws for fill in fills))


def _whole_reads(key: str, source: str, boxes: Sequence[Box], saved: TensorStorageMetadata) -> TensorReads:
    """Return the reads from a tensor that was saved as one chunk."""
    items = [_dcp.whole_read(key, source, saved, box) for box in boxes]
    return TensorReads(items, [], any(box.sizes != tuple(saved.size) for box in boxes))

"""Reads that fill the boxes of one tensor from saved chunks, with the proof that they fill every element once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Box, ChunkIndex, Flaw, covers_exactly, find_flaws


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
        self._index: ChunkIndex | _dcp.Chunks | None = None

    def plan(self, boxes: Sequence[Box]) -> TensorReads:
        """Plan the reads that fill ``boxes``, the distinct boxes that this process needs."""
        saved = self._saved
        if _dcp.is_one_chunk(saved):
            resharded = any(box.sizes != tuple(saved.size) for box in boxes)
            return TensorReads([_dcp.whole_read(self._key, self._source, saved, box) for box in boxes], [], resharded)
        chunks = _dcp.boxes_of(saved)
        if self._index is None:
            self._index = saved.chunks if isinstance(saved.chunks, _dcp.Chunks) else ChunkIndex(chunks)
        reads_of_box = _dcp.TensorReads(self._key, self._source, chunks)
        items: list[ReadItem] = []
        flaws: list[Flaw] = []
        resharded = False
        for box in boxes:
            numbers, overlaps = self._index.overlaps(box)
            if covers_exactly(box, overlaps):
                items += reads_of_box.fill(box, numbers, overlaps)
                is_a_chunk = len(numbers) == 1 and tuple(saved.chunks[int(numbers[0])].sizes) == box.sizes
                resharded = resharded or not is_a_chunk
            else:
                flaws += find_flaws(box, overlaps)
        return TensorReads(items, flaws, resharded)


def plan_reads(key: str, source: str, boxes: Sequence[Box], saved: TensorStorageMetadata) -> TensorReads:
    """Plan the reads that fill ``boxes``.

    Args:
        key: key in the target.
        source: key in the checkpoint.
        boxes: the distinct boxes that this process needs.
        saved: the checkpoint's entry for ``source``.
    """
    return ReadPlanner(key, source, saved).plan(boxes)

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


def plan_reads(key: str, source: str, boxes: Sequence[Box], saved: TensorStorageMetadata) -> TensorReads:
    """Plan the reads that fill ``boxes``.

    Args:
        key: key in the target.
        source: key in the checkpoint.
        boxes: the distinct boxes that this process needs.
        saved: the checkpoint's entry for ``source``.
    """
    if _dcp.is_one_chunk(saved):
        resharded = any(box.sizes != tuple(saved.size) for box in boxes)
        return TensorReads([_dcp.whole_read(key, source, saved, box) for box in boxes], [], resharded)
    chunks = _dcp.boxes_of(saved)
    index, reads_of_box = ChunkIndex(chunks), _dcp.TensorReads(key, source, chunks)
    items: list[ReadItem] = []
    flaws: list[Flaw] = []
    resharded = False
    for box in boxes:
        numbers, overlaps = index.overlaps(box)
        if covers_exactly(box, overlaps):
            items += reads_of_box.fill(box, numbers, overlaps)
            is_a_chunk = len(numbers) == 1 and tuple(saved.chunks[int(numbers[0])].sizes) == box.sizes
            resharded = resharded or not is_a_chunk
        else:
            flaws += find_flaws(box, overlaps)
    return TensorReads(items, flaws, resharded)

"""Exports of live tensors to stores whose files are written whole: each file by one rank.

The rank that writes a file gets the boxes of its tensors from the other ranks through the process group, in rounds. In
each round, every rank gets the next tensors of its files. So a rank holds the tensors of one round, never a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.exchange.bits import raw_bytes
from torch_xla_ckpt.exchange.from_state import box_of, fetched
from torch_xla_ckpt.exchange.layout import OutFile, OutTensor, batches_of
from torch_xla_ckpt.exchange.streamed_files import StreamedFiles
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.state import Buffers


class _Piece(NamedTuple):
    """A box of a tensor on its way to the rank that writes the tensor's file.

    Args:
        name: the tensor's name.
        box: the box.
        data: the bytes of the box's elements in C order, as a numpy array, which can be pickled.
    """

    name: str
    box: Box
    data: Any


def write_whole_files(
    files: StreamedFiles,
    shares: Sequence[Sequence[OutFile]],
    items: Sequence[WriteItem],
    planner: SavePlanner,
    processes: Processes,
    doing: str,
    memory_budget: int,
) -> None:
    """Write all files, together with the other ranks.

    Args:
        files: the files that this rank writes.
        shares: the files that each rank writes.
        items: the boxes that this rank holds and is to contribute.
        planner: fetches the boxes.
        processes: the ranks that export together.
        doing: the operation, for errors; the same text on all ranks.
        memory_budget: bytes of boxes that are in the memory of all ranks together. One tensor may exceed it.

    Raises:
        CheckpointError: a rank could not fetch or write; on all ranks.
    """
    own = _by_name(items)
    queues = [
        batches_of([tensor for file in share for tensor in file.tensors], memory_budget // processes.size)
        for share in shares
    ]
    buffers = Buffers()
    try:
        for batches in zip_longest(*queues, fillvalue=[]):
            with processes.agreed(doing):
                pieces = [_pieces(batch, own, planner) for batch in batches]
            arrived = [processes.gather_on(rank, some, doing) for rank, some in enumerate(pieces)]
            with processes.agreed(doing):
                _write(files, batches[processes.rank], arrived[processes.rank], buffers)
    except BaseException:
        files.abandon()
        raise


def _by_name(items: Sequence[WriteItem]) -> dict[str, list[WriteItem]]:
    by_name: dict[str, list[WriteItem]] = {}
    for item in items:
        by_name.setdefault(item.index.fqn, []).append(item)
    return by_name


def _pieces(tensors: Sequence[OutTensor], own: dict[str, list[WriteItem]], planner: SavePlanner) -> list[_Piece]:
    """Return what this rank holds of some tensors."""
    return [
        _Piece(tensor.name, box_of(item), np.frombuffer(raw_bytes(fetched(planner, item)), np.uint8))
        for tensor in tensors
        for item in own.get(tensor.name, ())
    ]


def _write(
    files: StreamedFiles, tensors: Sequence[OutTensor], arrived: Sequence[Sequence[_Piece]], buffers: Buffers
) -> None:
    """Put tensors together from the pieces of all ranks, and write them."""
    by_name: dict[str, list[_Piece]] = {}
    for piece in (piece for pieces in arrived for piece in pieces):
        by_name.setdefault(piece.name, []).append(piece)
    for tensor in tensors:
        whole = buffers.empty(tensor.shape, tensor.saved)
        for piece in by_name.get(tensor.name, ()):
            if piece.box.volume:
                elements = torch.from_numpy(piece.data).view(tensor.saved)
                whole[piece.box.slices].copy_(elements.view(piece.box.sizes))
        files.write(tensor, whole)

"""Reading tensors of a checkpoint piece by piece, in the order of their bytes, without more than a budget in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Box, Shard, TensorLayout
from torch_xla_ckpt.planner import SPMDLoadPlanner
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.storage import ShardReader


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint.

    Args:
        key: the tensor's key.
        shape: the tensor's shape.
        dtype: the tensor's dtype.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_structure(reader: ShardReader, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values under some top-level keys, with tensors on the meta device, of which nothing is read.

    Keys that the checkpoint lacks are left empty.
    """
    target: dict[str, Any] = {key: {} for key in keys}
    planner = SPMDLoadPlanner(missing="keep", placement=lambda *_: "meta", access=partial(_same, _WindowAccess({})))
    _load(target, reader, planner)
    return target


def read_in_order(reader: ShardReader, tensors: Sequence[SavedTensor], budget: int) -> Iterator[memoryview]:
    """Yield the bytes of tensors, one tensor after the other.

    Args:
        reader: reads the checkpoint.
        tensors: the tensors to read.
        budget: bytes to have in memory at a time. A row of elements that is longer is read alone.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    for group in _groups(tensors, budget):
        targets = {one.key: torch.empty(one.shape, dtype=one.dtype, device="meta") for one, _ in group}
        access = _WindowAccess({id(targets[one.key]): box for one, box in group})
        _load(targets, reader, SPMDLoadPlanner(unexpected="ignore", dtype="error", access=partial(_same, access)))
        for one, _ in group:
            data = access.data.pop(id(targets[one.key]))
            yield data.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _same(access: TensorAccess, tensor: torch.Tensor) -> TensorAccess:
    """Return the access for every tensor."""
    return access


def _load(target: dict[str, Any], reader: ShardReader, planner: SPMDLoadPlanner) -> None:
    try:
        _dcp.load(target, reader, planner, None, True)
    except CheckpointException as error:
        raise _dcp.cause(error, "read", several=False) from error


def _groups(tensors: Sequence[SavedTensor], budget: int) -> Iterator[list[tuple[SavedTensor, Box]]]:
    """Yield what to read at a time: several whole tensors, or a part of one."""
    group: list[tuple[SavedTensor, Box]] = []
    size = 0
    for one in tensors:
        for box in _boxes(one.shape, max(1, budget // one.dtype.itemsize)):
            nbytes = box.volume * one.dtype.itemsize
            if not nbytes:
                continue
            if group and (size + nbytes > budget or group[-1][0] is one):
                yield group
                group, size = [], 0
            group.append((one, box))
            size += nbytes
    if group:
        yield group


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Yield boxes that follow each other in memory and cover a tensor, of at most ``limit`` elements each."""
    if not shape or math.prod(shape) <= limit:
        yield Box.whole(shape)
        return
    row = math.prod(shape[1:])
    if row > limit:
        for index in range(shape[0]):
            for box in _boxes(shape[1:], limit):
                yield Box((index, *box.offsets), (1, *box.sizes))
        return
    for start in range(0, shape[0], limit // row):
        rows = min(limit // row, shape[0] - start)
        yield Box((start, *[0] * len(shape[1:])), (rows, *shape[1:]))


class _WindowAccess(TensorAccess):
    """Access to targets on the meta device, of which only one box is loaded.

    Args:
        boxes: the box to load, by the target's ``id``. Of other targets, nothing is loaded.

    Attributes:
        data: the data of each box, by the target's ``id``.
    """

    def __init__(self, boxes: Mapping[int, Box]):
        self._boxes = boxes
        self.data: dict[int, torch.Tensor] = {}

    def settle(self) -> None:
        """Do nothing: the targets have no data."""

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        box = self._boxes.get(id(tensor))
        shards = () if box is None else (Shard(box, "cpu"),)
        shape = tuple(tensor.shape)
        return TensorLayout(shape, tensor.dtype, shards, shape if box is None else box.sizes, "host", identical=True)

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        raise NotImplementedError("targets of a load are not fetched")

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        return 0

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        self.data[id(tensor)] = shards[layout.shards[0].box]

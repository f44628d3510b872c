"""Exports of live tensors: every rank writes the boxes that it holds to their place in the files.

The files are written by a DCP storage writer, so that the save planner's proof of an exact cover, the balance between
ranks, and the errors of one rank on all ranks are the same as in a save.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.exchange.layout import OutTensor
from torch_xla_ckpt.exchange.local_files import LocalFiles
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.state import Buffers
from torch_xla_ckpt.storage import as_bits, default_threads


class ModelWriter(StorageWriter):
    """DCP storage that writes the files of a model.

    Args:
        begin: called on the coordinator with shape and dtype of all tensors. Lays out the files and creates them.
        write: called on every rank with what ``begin`` returned, the rank's plan, and the planner.
        commit: called on the coordinator when all ranks have written.
    """

    def __init__(
        self,
        begin: Callable[[Mapping[str, tuple[tuple[int, ...], torch.dtype]]], Any],
        write: Callable[[Any, SavePlan, SavePlanner], None],
        commit: Callable[[], None],
    ):
        super().__init__()
        self._begin = begin
        self._write = write
        self._commit = commit

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for item in (item for plan in plans for item in plan.items):
            assert item.tensor_data is not None
            found[item.index.fqn] = tuple(item.tensor_data.size), item.tensor_data.properties.dtype
        told = self._begin(found)
        return [replace(plan, storage_data=told) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        self._write(plan.storage_data, plan, planner)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._commit()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def write_boxes(files: LocalFiles, items: Sequence[WriteItem], planner: SavePlanner, memory_budget: int) -> None:
    """Write a rank's boxes to local files. This thread fetches them, and other threads write.

    Boxes of one tensor that follow one another in the file are put together first, so that each row is not a write.

    Args:
        files: the open files.
        items: the boxes to write, those of one tensor next to each other.
        planner: fetches the boxes.
        memory_budget: bytes of fetched boxes that wait to be written.
    """
    buffers = Buffers()
    running: dict[Future[None], int] = {}
    used = 0
    with ThreadPoolExecutor(default_threads(remote=False), "export") as pool:
        for name, group in groupby(items, lambda item: item.index.fqn):
            together = list(group)
            boxes = [box_of(item) for item in together]
            tensor = files.tensor(name)
            copies = 1 if len(boxes) == 1 else 2  # the boxes, and what they are put together in
            cost = copies * sum(box.volume for box in boxes) * tensor.saved.itemsize
            while running and used + cost > memory_budget:
                done = wait(running, return_when=FIRST_COMPLETED).done
                for future in done:
                    used -= running.pop(future)
                    future.result()
            parts = [fetched(planner, item) for item in together]
            running[pool.submit(_write_tensor, files, tensor, boxes, parts, buffers)] = cost
            used += cost
            del parts
        for future in running:
            future.result()


def _write_tensor(
    files: LocalFiles, tensor: OutTensor, boxes: Sequence[Box], parts: list[torch.Tensor], buffers: Buffers
) -> None:
    """Write the boxes of one tensor, and release the elements of each box as soon as they are written or copied."""
    region = _region_of(tensor.shape, boxes)
    if region is None or len(boxes) == 1:
        for box, data in zip(boxes, parts):
            files.write(tensor.name, box, as_bits(data))
        return
    together = buffers.empty(region.sizes, tensor.saved)
    while parts:
        box = boxes[len(parts) - 1]
        together[box.relative_to(region).slices].copy_(parts.pop())
    files.write(tensor.name, region, as_bits(together))


def _region_of(shape: tuple[int, ...], boxes: Sequence[Box]) -> Box | None:
    """Return the region that boxes without a common element fill without a gap; None if they fill no region."""
    if not shape:
        return boxes[0]
    low = tuple(min(box.offsets[dim] for box in boxes) for dim in range(len(shape)))
    high = tuple(max(box.offsets[dim] + box.sizes[dim] for box in boxes) for dim in range(len(shape)))
    region = Box(low, tuple(b - a for a, b in zip(low, high)))
    return region if region.volume == sum(box.volume for box in boxes) else None


def fetched(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """Return the elements of an item in host memory."""
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        raise CheckpointError(f"{item.index.fqn!r} is no tensor. Nothing was exported")
    return data.detach()


def box_of(item: WriteItem) -> Box:
    """Return the region of the whole tensor that an item holds."""
    assert item.tensor_data is not None
    return _dcp.box_of(item.tensor_data.chunk)

"""Which items to write in which order: fetch their data in the plan's order, as the memory budget has room.

Items are handed to the writing threads in batches, so that small items do not cost a hand-over each.
"""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from torch_xla_ckpt.protocols import SaveSource
from torch_xla_ckpt.reports import FETCH, PACK, SERIALIZE, STORAGE, Tally, Timeline
from torch_xla_ckpt.storage.data_file import SMALL
from torch_xla_ckpt.storage.limits import ObjectSizes
from torch_xla_ckpt.storage.memory_budget import MemoryBudget

_BATCH_BYTES = 4 << 20  # a batch for a thread is full when it has this many bytes
_BATCH_ITEMS = 256  # or this many items


class WriteJob(NamedTuple):
    """An item to write, and its data.

    Args:
        item: the item.
        data: the tensor, or the bytes of an object.
        sharding: the sharding of the tensor, for people; None if the planner does not tell.
        nbytes: the bytes of the tensor; 0 for an object.
        held: the bytes to give back to the memory budget when the item is written.
        number: the item's position in the plan.
    """

    item: WriteItem
    data: torch.Tensor | io.BytesIO
    sharding: str | None
    nbytes: int
    held: int
    number: int

    @property
    def payload(self) -> int:
        """The bytes of the tensor or the object."""
        return self.nbytes if isinstance(self.data, torch.Tensor) else self.data.getbuffer().nbytes


def tensor_bytes(item: WriteItem) -> int:
    """Return the bytes of an item's tensor; 0 for an object."""
    tensor = item.tensor_data
    return 0 if tensor is None else tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize


def batches(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    budget: MemoryBudget,
    timeline: Timeline,
    file_bytes: int | None = None,
) -> Iterator[list[WriteJob]]:
    """Ask the planner for the data of all items, in order, and yield it in batches.

    Items that are next to each other in the plan and share a part of a tensor are fetched together. So the memory for
    all of them is taken from the budget together. Each item gives its bytes back, and the last one gives back the rest.

    Args:
        items: the items.
        planner: returns the data.
        budget: the memory budget.
        timeline: records fetching, serializing and waiting.
        file_bytes: the mean of the bytes with which batches are full that become data files in a store. Their bytes are
            copied when they are sent, so they count even if fetching them takes no memory. Default: batches of 4 MiB or
            256 items.
    """
    source = planner if isinstance(planner, SaveSource) else None
    most_items = _BATCH_ITEMS if file_bytes is None else len(items)
    objects = None if file_bytes is None else ObjectSizes(file_bytes, sum(map(tensor_bytes, items)))

    def size_after(nbytes: int) -> int:
        """Return the bytes with which the next batch is full, after a batch of ``nbytes``."""
        return _BATCH_BYTES if objects is None else objects.after(nbytes)

    def part_of(item: WriteItem) -> tuple[str, int | None]:
        """Return the key, and the number of the part that is fetched with the item; None for an object."""
        if item.tensor_data is None:
            return item.index.fqn, None
        return item.index.fqn, 0 if source is None else source.part(item)

    batch: list[WriteJob] = []
    waiting = position = 0
    most_bytes = size_after(0)
    tally = Tally(timeline, PACK)
    for (key, part), group in itertools.groupby(items, part_of):
        together = list(group)
        sizes = list(map(tensor_bytes, together))
        sharding, cost = None, sum(sizes)
        if source is not None and part is not None:
            sharding = source.sharding(key)
            cost = max(source.host_bytes(key, part), 0 if file_bytes is None else cost)
        if not budget.take(cost, wait=False):
            tally.record()
            with timeline.span(STORAGE):
                has_room = budget.take(cost, own=sum(job.held for job in batch))
            if not has_room:  # there is no room before these are written
                yield batch
                batch, waiting, most_bytes = [], 0, size_after(waiting)
                with timeline.span(STORAGE):
                    budget.take(cost)
            tally.restart()
        left = cost
        for number, (item, nbytes) in enumerate(zip(together, sizes), 1):
            held = left if number == len(together) else min(nbytes, left)
            left -= held
            data = _fetch(item, nbytes, planner, tally)
            batch.append(WriteJob(item, data, sharding, nbytes, held, position))
            position += 1
            waiting += batch[-1].payload
            if waiting >= most_bytes or len(batch) >= most_items:
                tally.record()
                yield batch
                batch, waiting, most_bytes = [], 0, size_after(waiting)
                tally.restart()
    tally.record()
    if batch:
        yield batch


def _fetch(item: WriteItem, nbytes: int, planner: SavePlanner, tally: Tally) -> torch.Tensor | io.BytesIO:
    """Ask the planner for the data of an item, which fetches a tensor or serializes an object."""
    if nbytes >= SMALL:
        tally.record()  # a large tensor has a span of its own
    start = time.perf_counter()
    data = planner.resolve_data(item)
    tally.add(SERIALIZE if item.tensor_data is None else FETCH, time.perf_counter() - start, nbytes)
    if nbytes >= SMALL:
        tally.record()
    return data

"""The coordinator's decision who writes what: one writer for each box, and the proof that all is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import IncompleteCheckpointError
from torch_xla_ckpt.layout import Box, Claim, Integers, assign
from torch_xla_ckpt.planner.offers import Gathered, itemsizes, positions_of

_PIECE = 1 << 16  # rows that are compared together
_OBJECTS = 1 << 12  # objects that become rows together, while Python's lock is held


class Owners:
    """One writer for each box that the ranks offer.

    Args:
        offers: the offers of all ranks.
        divergent: values whose data differs between ranks. One rank writes each of their chunks, undivided.

    Attributes:
        catalog: everything that will be written.
        ranks: for each row of the catalog, the rank that writes it.
    """

    def __init__(self, offers: Gathered, divergent: Collection[int]):
        self._offers = offers
        entries = offers.entries
        order, first = _in_order(entries, offers.numbers, offers.boxes)
        numbers, boxes = offers.numbers[order[first]], offers.boxes[order[first]]
        ranks = offers.ranks[order[first]].astype(np.int64)
        shared = np.flatnonzero(np.diff(np.append(first, len(order))) > 1)
        is_divisible = np.array(
            [entry.dtype is not None and n not in divergent for n, entry in enumerate(entries)], dtype=bool
        )
        shared = shared[is_divisible[numbers[shared]]] if len(shared) else shared
        if len(shared):
            numbers, boxes, ranks = self._balanced(order, first, shared, numbers, boxes, ranks)
        bounds = np.searchsorted(numbers, np.arange(len(entries) + 1))
        self.catalog = _dcp.Catalog(tuple(entries), bounds, boxes)
        self.ranks = ranks
        self._numbers = numbers

    def _balanced(
        self,
        order: Integers,
        first: Integers,
        shared: Integers,
        numbers: Integers,
        boxes: Integers,
        ranks: Integers,
    ) -> tuple[Integers, Integers, Integers]:
        """Assign the boxes that several ranks hold, and return all rows in order again."""
        ndim = boxes.shape[1] // 2
        sizes = itemsizes(self._offers.entries)
        alone = np.ones(len(numbers), dtype=bool)
        alone[shared] = False
        nbytes = boxes[alone, ndim:].prod(axis=1) * sizes[numbers[alone]]
        written = np.bincount(ranks[alone], weights=nbytes).astype(np.int64)
        ends = np.append(first, len(order))
        holders: dict[bytes, tuple[int, ...]] = {}

        def holders_of(group: int) -> tuple[int, ...]:
            own = self._offers.ranks[order[ends[group] : ends[group + 1]]]
            key = own.tobytes()
            return holders.get(key) or holders.setdefault(key, tuple(dict.fromkeys(own.tolist())))

        claims: list[Claim] = []
        for at in range(0, len(shared), _OBJECTS):
            some = shared[at : at + _OBJECTS]
            columns = some.tolist(), boxes[some].tolist(), sizes[numbers[some]].tolist()
            claims += [
                Claim(Box(tuple(row[:ndim]), tuple(row[ndim:])), itemsize, holders_of(group))
                for group, row, itemsize in zip(*columns)
            ]
        assigned = assign(claims, dict(enumerate(written.tolist())))
        parts = [assigned[at : at + _OBJECTS] for at in range(0, len(assigned), _OBJECTS)]
        table = np.concatenate(
            [
                np.array([(one.claim, one.rank, *one.box.offsets, *one.box.sizes) for one in part], dtype=np.int64)
                for part in parts
            ]
        )
        all_numbers = np.concatenate([numbers[alone], numbers[shared[table[:, 0]]]])
        all_ranks = np.concatenate([ranks[alone], table[:, 1]])
        all_boxes = np.concatenate([boxes[alone], table[:, 2:]])
        again, _ = _in_order(self._offers.entries, all_numbers, all_boxes)
        return all_numbers[again], all_boxes[again], all_ranks[again]

    def items(self) -> list[_dcp.AssignedItems]:
        """Return the items of each rank."""
        offers, catalog = self._offers, self.catalog
        ranks = _dcp.narrow(self.ranks)
        order = np.argsort(ranks, kind="stable")
        ends = np.searchsorted(ranks[order], np.arange(len(offers.ids) + 1))
        boxes = _dcp.narrow(catalog.boxes)
        local = np.zeros(len(offers.entries), dtype=np.int64)
        found = []
        for rank, ids in enumerate(offers.ids):
            rows = order[ends[rank] : ends[rank + 1]]
            local[ids] = np.arange(len(ids))
            own = local[self._numbers[rows]]
            found.append(_dcp.AssignedItems(catalog, self._numbers, rows, own, boxes[rows]))
        return found


def _in_order(entries: Sequence[_dcp.Entry], numbers: Integers, boxes: Integers) -> tuple[Integers, Integers]:
    """Return the order of rows by value, then by the offsets and sizes of their boxes, and then as they were.

    Returns:
        The order, and the positions in it of the first row of each group of equal boxes of one value.
    """
    positions = positions_of(entries, numbers, boxes)
    if positions is not None:
        order = np.argsort(positions, kind="stable")
        positions, sorted_numbers = positions[order], numbers[order]
        differs = np.ones(len(order), dtype=bool)
        differs[1:] = (positions[1:] != positions[:-1]) | (sorted_numbers[1:] != sorted_numbers[:-1])
        if _are_equal(boxes, order, ~differs):
            return order, np.flatnonzero(differs)
    # Boxes overlap or leave their tensor. The proof will say so, and needs equal boxes side by side.
    ndim = boxes.shape[1] // 2
    columns = [*range(ndim, 2 * ndim), *range(ndim)]
    order = np.lexsort([*(boxes[:, column] for column in reversed(columns)), numbers])
    differs = np.ones(len(order), dtype=bool)
    numbers, boxes = numbers[order], boxes[order]
    differs[1:] = (numbers[1:] != numbers[:-1]) | (boxes[1:] != boxes[:-1]).any(axis=1)
    return order, np.flatnonzero(differs)


def _are_equal(boxes: Integers, order: Integers, same: npt.NDArray[np.bool_]) -> bool:
    """Return whether all boxes at the places of an order where ``same`` is true equal the boxes before them."""
    for at in range(0, len(order) - 1, _PIECE):
        claimed = same[at + 1 : at + 1 + _PIECE]
        if claimed.any():
            part = boxes[order[at : at + 1 + _PIECE]]
            if ((part[1:] != part[:-1]).any(axis=1) & claimed).any():
                return False
    return True


def prove_complete(metadata: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]) -> None:
    """Prove that the chunks of every tensor cover it exactly once.

    Args:
        metadata: the checkpoint's entries by key, with the chunks that will be written.

    Raises:
        IncompleteCheckpointError: naming every incomplete tensor, and the regions.
    """
    broken = []
    proven: set[tuple[object, ...]] = set()  # equal chunks of equal shapes need one proof
    seen: set[tuple[int, torch.Size]] = set()
    for key, saved in metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            continue
        known = id(saved.chunks), saved.size  # tensors with equal chunks share them
        if known in seen:
            continue
        if _dcp.is_one_chunk(saved):
            seen.add(known)
            continue
        geometry = _dcp.geometry(saved)
        if geometry in proven:
            continue
        if flaws := _dcp.cover_flaws(saved):
            broken.append((key, f"{key!r} of shape {tuple(saved.size)}: {'; '.join(map(str, flaws))}"))
        else:
            proven.add(geometry)
            seen.add(known)
    if broken:
        raise IncompleteCheckpointError(
            "the ranks of this save do not hold every element exactly once:\n  "
            + "\n  ".join(text for _, text in broken)
            + "\nNothing was written. If the program runs on several hosts, every host must take part in the save, in "
            "one process group",
            keys=[key for key, _ in broken],
        )

"""The coordinator's choice of a reader for each byte range that several ranks need.

All ranks handle items in the same order, cut into rounds. A parcel belongs to one round, and a rank handles a round as
a whole. So the first round that is not finished never waits for a later one, and no rank waits for ever, whatever the
ranks' memory budgets are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_xla_ckpt.cooperation.needs import Needs, Parcel, Share
from torch_xla_ckpt.layout import Integers

CUT = 4 << 20
"""A range may be cut at multiples of this many bytes from its start. A checksum covers a block of as many bytes."""
_MOST_BYTES = 16 << 20  # of a parcel
_PARCELS = 4  # parcels for each rank, so that the last ones to arrive are not late
_BUDGET_SHARE = 4  # rounds that fit into the memory budget
_ROUND_ITEMS = 1024
_SLICE = 1 << 16  # numbers of a table of intervals and ranks that are handled at a time

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Flags = np.ndarray[Any, np.dtype[np.bool_]]


def assign(needs: Sequence[Needs], least_bytes: int = 0) -> list[Share] | None:
    """Return each rank's part of reading together.

    Args:
        needs: what each rank needs. All ranks mean the same files and the same metadata.
        least_bytes: bytes that reading together must save. Default 0.

    Returns:
        The parts; None if reading together would save fewer bytes, or none.
    """
    items = _Items.of(needs)
    parts = _intervals(items, len(needs))
    shared = parts.holders > 1
    saved = int((parts.nbytes * (parts.holders - 1))[shared].sum())
    if saved <= 0 or saved < least_bytes:
        return None
    shared_bytes = int(parts.nbytes[shared].sum())
    most = min(max(CUT, shared_bytes // (_PARCELS * len(needs)) // CUT * CUT), _MOST_BYTES)
    budget = min(one.memory_budget for one in needs)
    rounds = _rounds(items, parts, max(1, min(len(needs) * most, budget // _BUDGET_SHARE)))
    parcels = _with_readers(_runs(parts, shared, rounds, most), items.files, parts)
    own: list[list[Parcel]] = [[] for _ in needs]
    for parcel in parcels:
        for rank in (parcel.reader, *parcel.receivers):
            own[rank].append(parcel)
    return [Share(rounds[positions], tuple(mine)) for positions, mine in zip(items.positions, own)]


@dataclass(frozen=True)
class _Items:
    """The items that any rank needs, in the order in which all ranks handle them: objects first, then key by key.

    Args:
        files: the names of all files, ascending.
        is_tensor: for each item, 0 for an object and 1 for a tensor.
        file: for each item, the position of its file in ``files``.
        positions: for each rank, the positions of its items in this order.
        ranges: for each rank, its ranges: the position of the item, start and stop.
    """

    files: Sequence[str]
    is_tensor: Integers
    file: Integers
    positions: Sequence[Integers]
    ranges: Sequence[Integers]

    @classmethod
    def of(cls, needs: Sequence[Needs]) -> _Items:
        files = sorted({name for one in needs for name in one.files})
        numbers = {name: number for number, name in enumerate(files)}
        tables = []
        for one in needs:
            table = one.items.copy()
            if len(table):
                table[:, 2] = np.array([numbers[name] for name in one.files], dtype=np.int64)[table[:, 2]]
            tables.append(table)
        rows = np.concatenate(tables) if tables else np.zeros((0, 4), dtype=np.int64)
        places, inverse = np.unique(rows[:, 2:], axis=0, return_inverse=True)
        which = inverse.reshape(-1)
        kind, key = (np.zeros(len(places), dtype=np.int64) for _ in range(2))
        kind[which], key[which] = rows[:, 0], rows[:, 1]
        first_of_key = np.full(int(key.max(initial=0)) + 1, len(places), dtype=np.int64)
        np.minimum.at(first_of_key, key, np.arange(len(places)))
        order = np.lexsort((np.arange(len(places)), first_of_key[key], kind))
        position = np.empty(len(order), dtype=np.int64)
        position[order] = np.arange(len(order))
        ends = np.cumsum([len(table) for table in tables])[:-1]
        positions = np.split(position[which], ends)
        ranges = []
        for one, own in zip(needs, positions):
            spans = one.ranges.copy()
            spans[:, 0] = own[spans[:, 0]] if len(own) else spans[:, 0]
            ranges.append(spans)
        return cls(files, kind[order], places[order, 0], positions, ranges)


@dataclass(frozen=True)
class _Intervals:
    """Byte ranges of items between two bounds of anybody's ranges, in the order of the items.

    Args:
        item: the position of each interval's item.
        file: the position of its file.
        start, nbytes: its first byte in the file, and its length.
        ranks: a bit for each rank that needs it, as ``np.packbits`` packs them.
        holders: the number of these ranks.
        alone: for each rank, the bytes that it alone needs.
    """

    item: Integers
    file: Integers
    start: Integers
    nbytes: Integers
    ranks: _Bytes
    holders: Integers
    alone: Integers


def _intervals(items: _Items, world: int) -> _Intervals:
    """Cut all ranges at each other's bounds."""
    rows = np.concatenate([np.column_stack([spans, np.full(len(spans), n)]) for n, spans in enumerate(items.ranges)])
    points = np.concatenate([rows[:, [0, 1]], rows[:, [0, 2]]])
    bounds, which = np.unique(points, axis=0, return_inverse=True)
    first, last = np.split(which.reshape(-1), 2)
    nbytes = np.zeros(len(bounds), dtype=np.int64)
    is_inside = bounds[1:, 0] == bounds[:-1, 0]
    nbytes[:-1][is_inside] = (bounds[1:, 1] - bounds[:-1, 1])[is_inside]
    packed, alone = [], np.zeros(world, dtype=np.int64)
    order = np.argsort(first, kind="stable")
    first, last, rank = first[order], last[order], rows[order, 3]
    for start, stop in _slices(bounds[:, 0], max(1, _SLICE // world)):
        a, b = np.searchsorted(first, [start, stop])
        changes = np.zeros((stop - start + 1, world), dtype=np.int32)
        np.add.at(changes, (first[a:b] - start, rank[a:b]), 1)
        np.add.at(changes, (last[a:b] - start, rank[a:b]), -1)
        needed = changes[:-1].cumsum(axis=0) > 0
        only = needed.sum(axis=1) == 1
        alone += (needed[only] * nbytes[start:stop][only, None]).sum(axis=0)
        packed.append(np.packbits(needed, axis=1))
    ranks = np.concatenate(packed) if packed else np.zeros((0, (world + 7) // 8), dtype=np.uint8)
    holders = np.unpackbits(ranks, axis=1).sum(axis=1, dtype=np.int64)
    kept = (nbytes > 0) & (holders > 0)
    item = bounds[kept, 0]
    return _Intervals(item, items.file[item], bounds[kept, 1], nbytes[kept], ranks[kept], holders[kept], alone)


def _slices(item: Integers, length: int) -> Iterator[tuple[int, int]]:
    """Yield starts and stops that cut a sorted list of items into slices of about ``length``, between items only."""
    start = 0
    while start < len(item):
        stop = min(start + length, len(item))
        stop = int(np.searchsorted(item, item[stop - 1], side="right"))
        yield start, stop
        start = stop


def _rounds(items: _Items, parts: _Intervals, most: int) -> Integers:
    """Return the round of each item. A round has about ``most`` bytes, and no round has objects and tensors."""
    cost = np.bincount(parts.item, parts.nbytes, len(items.file)) + most / _ROUND_ITEMS
    rounds = np.zeros(len(cost), dtype=np.int64)
    objects = int(np.searchsorted(items.is_tensor, 1))
    for start, stop in ((0, objects), (objects, len(cost))):
        before = np.cumsum(cost[start:stop]) - cost[start:stop]
        rounds[start:stop] = before // most + (rounds[start - 1] + 1 if start else 0)
    return rounds


@dataclass
class _Run:
    """Bytes of one file that one set of ranks needs, and one of them reads."""

    round: int
    file: int
    start: int
    stop: int
    group: int


def _runs(parts: _Intervals, shared: _Flags, rounds: Integers, most: int) -> tuple[list[_Run], list[Integers]]:
    """Cut and join the shared intervals to runs of at most ``most`` bytes.

    Returns:
        The runs, and for each group of ranks that they name, its ranks.
    """
    sets, group = np.unique(parts.ranks[shared], axis=0, return_inverse=True)
    groups = [np.flatnonzero(np.unpackbits(one)) for one in sets]
    columns = (rounds[parts.item[shared]], parts.file[shared], parts.start[shared], parts.nbytes[shared])
    runs: list[_Run] = []
    for round_, file, start, nbytes, number in zip(*(one.tolist() for one in (*columns, group.reshape(-1)))):
        for first in range(start, start + nbytes, most):
            stop = min(first + most, start + nbytes)
            last = runs[-1] if runs else None
            if (
                last is not None
                and (last.round, last.file, last.stop, last.group) == (round_, file, first, number)
                and stop - last.start <= most
            ):
                last.stop = stop
            else:
                runs.append(_Run(round_, file, first, stop, number))
    return runs, groups


def _with_readers(
    found: tuple[list[_Run], list[Integers]], files: Sequence[str], parts: _Intervals
) -> Iterator[Parcel]:
    """Yield the runs with their readers: the rank of each group that reads the fewest bytes so far.

    A rank that has begun to read small runs goes on until it has read as much as one large parcel. So neighbouring
    bytes are read together.
    """
    runs, groups = found
    load = parts.alone.copy()
    reader, left = -1, 0
    for number, run in enumerate(runs):
        ranks = groups[run.group]
        nbytes = run.stop - run.start
        if left < nbytes or reader not in ranks:
            reader, left = int(ranks[np.argmin(load[ranks])]), CUT
        left -= nbytes
        load[reader] += nbytes
        receivers = tuple(int(rank) for rank in ranks if rank != reader)
        yield Parcel(number, run.round, files[run.file], run.start, run.stop, reader, receivers)

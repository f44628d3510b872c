"""The offers of all ranks for a save: gathered, compared, and grouped by what they have in common.

An offer is a box of a tensor, or an object, that a rank could write because it holds the data. Replicas are offered by
several ranks. Offers are arrays of integers, because a pod makes millions of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box, Integers
from torch_xla_ckpt.state import Leaf, TensorHandle

_PIECE = 1 << 16  # rows that are worked on together, so that temporary arrays stay in the processor's cache


@dataclass(frozen=True)
class LocalFacts:
    """What a rank sends to the coordinator with its offers.

    Args:
        numbers: the positions of the values that other ranks may hold with other data, in the rank's state dict.
        digests: a digest of each of these values, 16 bytes each.
        names: the rank's values, as in its offers. A pickle holds them once.
        held: the digest of the items that the rank was told to write after the same offers; empty if it has none.
    """

    numbers: _dcp.AnyIntegers
    digests: bytes = b""
    names: tuple[bytes, ...] = ()
    held: bytes = b""

    @classmethod
    def of(
        cls,
        entries: Sequence[_dcp.Entry],
        digests: Mapping[str, bytes],
        names: tuple[bytes, ...] = (),
        held: bytes = b"",
    ) -> LocalFacts:
        """Return the facts of a rank from the digests of its values by key."""
        numbers = [number for number, entry in enumerate(entries) if entry.key in digests]
        joined = b"".join(digests[entries[n].key] for n in numbers)
        return cls(np.array(numbers, dtype=np.int64), joined, names, held)

    def by_key(self) -> tuple[dict[str, _dcp.Entry], dict[str, bytes]]:
        """Return the rank's values, and the digests, by key."""
        entries = [entry for piece in self.names for entry in _dcp.decoded_entries(piece)]
        digests = {entries[n].key: self.digests[16 * i : 16 * i + 16] for i, n in enumerate(self.numbers.tolist())}
        return {entry.key: entry for entry in entries}, digests

    @property
    def pairs(self) -> Integers:
        """The digests as two integers each."""
        return np.frombuffer(self.digests, dtype=np.int64).reshape(-1, 2)


def offers_of(entries: Sequence[_dcp.Entry], tensors: dict[str, TensorHandle]) -> _dcp.Offers:
    """Return a rank's offers: each distinct box that it holds, and its objects.

    A tensor without elements is offered as one empty chunk.

    Args:
        entries: the rank's values.
        tensors: the tensors with their layouts, by key.
    """
    boxes: dict[str, Sequence[Box]] = {}
    for entry in entries:
        boxes[entry.key] = (Box((), ()),)
        if entry.dtype is not None:
            whole = Box.whole(entry.shape)
            boxes[entry.key] = tensors[entry.key].layout.boxes if whole.volume else (whole,)
    return _packed(entries, boxes)


def entry_of(key: str, leaf: Leaf, held: TensorHandle | None) -> _dcp.Entry:
    """Return the description of a value of a state dict; ``held`` is None for an object."""
    if held is None:
        return _dcp.Entry(key, leaf.path)
    layout = held.layout
    return _dcp.Entry(
        key, leaf.path, layout.dtype, tuple(layout.shape), bool(held.tensor.requires_grad), layout.sharding
    )


def as_sent(own: _dcp.AssignedItems, plan: SavePlan) -> _dcp.AssignedItems:
    """Return a rank's items in the form in which they are sent.

    Args:
        own: the items.
        plan: what the rank has sent.
    """
    facts = plan.planner_data
    if not isinstance(plan.items, (_dcp.Offers, _dcp.PackedOffers)):
        # A subclass or a storage writer has made a list. The rank's values are numbered as without it.
        return own.sent_as_list()
    return own.sent_to(facts.held) if isinstance(facts, LocalFacts) else own


class SentPlan(NamedTuple):
    """What the coordinator got from one rank.

    Args:
        offers: the rank's offers.
        facts: what the rank sent with them.
        entries: the rank's values, if they did not have to be sent.
    """

    offers: _dcp.PackedOffers
    facts: LocalFacts
    entries: Sequence[_dcp.Entry] | None = None

    @classmethod
    def of(cls, plan: SavePlan) -> SentPlan:
        """Return a local plan of our planner. A subclass or a storage writer may have made a list of its items."""
        items: Any = plan.items
        facts = plan.planner_data
        facts = facts if isinstance(facts, LocalFacts) else LocalFacts(np.zeros(0, dtype=np.int64))
        if isinstance(items, (_dcp.Offers, _dcp.PackedOffers)):
            return cls(items.packed, facts, items.entries if isinstance(items, _dcp.Offers) else None)
        known, digests = facts.by_key()
        entries: dict[str, _dcp.Entry] = {}
        boxes: dict[str, list[Box]] = {}
        for item in items:
            key, tensor = item.index.fqn, item.tensor_data
            entry = known.get(key, _dcp.Entry(key, (key,)))
            if tensor is None:
                entries[key] = entry._replace(dtype=None, shape=(), requires_grad=False)
            else:
                dtype, grad = tensor.properties.dtype, tensor.properties.requires_grad
                entries[key] = entry._replace(dtype=dtype, shape=tuple(tensor.size), requires_grad=grad)
            boxes.setdefault(key, []).append(Box((), ()) if tensor is None else _dcp.box_of(tensor.chunk))
        values = list(entries.values())
        return cls(_packed(values, boxes).packed, LocalFacts.of(values, digests))


def _packed(entries: Sequence[_dcp.Entry], boxes: Mapping[str, Sequence[Box]]) -> _dcp.Offers:
    """Return offers from the boxes of each value by key."""
    ndim = max((len(entry.shape) for entry in entries), default=0)
    rows = [_dcp.padded_row(box, ndim) for entry in entries for box in boxes[entry.key]]
    counts = np.array([len(boxes[entry.key]) for entry in entries], dtype=np.int64)
    return _dcp.Offers(entries, counts, np.array(rows, dtype=np.int64).reshape(len(rows), 2 * ndim))


def digest_of(plans: Sequence[SentPlan]) -> bytes:
    """Return a digest of everything in the ranks' plans that decides who writes what."""
    digest = hashlib.blake2b(digest_size=32)
    for plan in plans:
        digest.update(plan.offers.digest)
        digest.update(len(plan.facts.numbers).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(plan.facts.numbers, dtype=np.int64).tobytes())
    return digest.digest()


class Gathered:
    """The offers of all ranks, as arrays with one row for each offer.

    Args:
        plans: what each rank sent.

    Attributes:
        entries: the values of all ranks, in the order of the lowest rank that has them.
        ids: for each rank, the position of each of its values in ``entries``.
        numbers: for each offer, the position of its value in ``entries``.
        ranks: for each offer, the rank that made it. Ascending.
        boxes: for each offer, its box, padded as in ``_dcp.Items``.

    Raises:
        CheckpointError: two ranks offer different kinds, shapes or dtypes for one key.
    """

    def __init__(self, plans: Sequence[SentPlan]):
        self.entries: list[_dcp.Entry] = []
        self._positions: dict[str, int] = {}
        self._first_ranks: list[int] = []
        self._decoded: dict[bytes, Integers] = {}
        offers = [plan.offers for plan in plans]
        self.ids = [self._ids(rank, plan) for rank, plan in enumerate(plans)]
        ndim = max((own.ndim for own in offers), default=0)
        self.numbers = np.concatenate([np.repeat(ids, own.counts) for ids, own in zip(self.ids, offers)])
        self.ranks = np.empty(len(self.numbers), dtype=np.int32)
        self.boxes = np.empty((len(self.numbers), 2 * ndim), dtype=np.int64)
        end = 0
        for rank, own in enumerate(offers):
            start, end = end, end + len(own)
            self.ranks[start:end] = rank
            self.boxes[start:end] = own.boxes(ndim)

    def _ids(self, rank: int, plan: SentPlan) -> Integers:
        """Return the positions of a rank's values. Most ranks have equal values, which are decoded once."""
        if plan.entries is not None:
            return np.array([self._position(rank, entry) for entry in plan.entries], dtype=np.int64)
        parts = [np.zeros(0, dtype=np.int64)]
        for piece in plan.offers.names:
            ids = self._decoded.get(piece)
            if ids is None:
                found = [self._position(rank, entry) for entry in _dcp.decoded_entries(piece)]
                ids = self._decoded[piece] = np.array(found, dtype=np.int64)
            parts.append(ids)
        return np.concatenate(parts)

    def _position(self, rank: int, entry: _dcp.Entry) -> int:
        position = self._positions.get(entry.key)
        if position is None:
            position = self._positions[entry.key] = len(self.entries)
            self.entries.append(entry)
            self._first_ranks.append(rank)
            return position
        known = self.entries[position]
        if (known.dtype, known.shape) != (entry.dtype, entry.shape):
            raise CheckpointError(
                f"ranks disagree about {entry.key!r}: rank {self._first_ranks[position]} has {known}, rank {rank} has "
                f"{entry}. Nothing was written. To save the value of each rank, put the rank in the key"
            )
        return position


def positions_of(entries: Sequence[_dcp.Entry], numbers: Integers, boxes: Integers) -> Integers | None:
    """Return a number for each row: rows ascend by value, then by the row-major order of their first elements.

    None if there is no such number below 2**63, or if a box leaves its tensor.
    """
    ndim = boxes.shape[1] // 2
    shapes = np.array([_dcp.padded_row(Box.whole(e.shape), ndim)[ndim:] for e in entries], dtype=np.float64)
    shapes = np.maximum(shapes.reshape(len(entries), ndim), 1)
    volumes = shapes.prod(axis=1)
    if volumes.sum() >= 1 << 62:
        return None
    sizes = shapes.astype(np.int64)
    strides = np.ones_like(sizes)
    for dim in range(ndim - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * sizes[:, dim + 1]
    base = np.concatenate([[0], np.cumsum(sizes.prod(axis=1))])
    positions = np.empty(len(numbers), dtype=np.int64)
    for at in range(0, len(numbers), _PIECE):
        part = slice(at, at + _PIECE)
        own = numbers[part]
        found = base[own]
        for dim in range(ndim):
            starts = boxes[part, dim]
            if (starts + boxes[part, ndim + dim] > sizes[own, dim]).any():
                return None
            found += starts * strides[own, dim]
        positions[part] = found
    return positions


def divergent_numbers(ids: Sequence[Integers], plans: Sequence[SentPlan]) -> frozenset[int]:
    """Return the values whose data differs between the ranks that have them, as positions among all ranks' values.

    Args:
        ids: for each rank, the position of each of its values.
        plans: what each rank sent.
    """
    facts = [plan.facts for plan in plans]
    numbers = np.concatenate([np.zeros(0, dtype=np.int64), *(own[fact.numbers] for own, fact in zip(ids, facts))])
    if not len(numbers):
        return frozenset()
    pairs = np.concatenate([fact.pairs for fact in facts])
    order = np.argsort(numbers, kind="stable")
    numbers, pairs = numbers[order], pairs[order]
    same = numbers[1:] == numbers[:-1]
    differ = same & (pairs[1:] != pairs[:-1]).any(axis=1)
    return frozenset(numbers[1:][differ].tolist())


def itemsizes(entries: Sequence[_dcp.Entry]) -> Integers:
    """Return the bytes of one element of each value; 0 for objects."""
    sizes = {dtype: _itemsize(dtype) for dtype in {entry.dtype for entry in entries}}
    return np.array([sizes[entry.dtype] for entry in entries], dtype=np.int64)


def _itemsize(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else dtype.itemsize

"""Which process writes which box.

Every process says which boxes it holds; a box that several hold needs one writer. Bytes are balanced with
McNaughton's wrap-around rule (Management Science 6(1), 1959): compute the level to which all holders can be filled,
lay the boxes end to end and cut the line at each holder's level. A group of n holders costs at most n - 1 cuts,
however many boxes it has, and each piece is a contiguous range of the box's rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_xla_ckpt.layout.box import Box

# Pieces smaller than this are not worth an item of their own in a file: below it, balance to the byte is given up.
_SMALLEST_PIECE = 4096
# A cut may miss the level by this share of a holder's bytes when that keeps whole rows together.
_SLACK = 0.01


@dataclass(frozen=True)
class Claim:
    """A box and the processes that hold its data.

    Args:
        box: the region held.
        itemsize: bytes of one element.
        holders: ranks of the processes that could write it, ascending.
        divisible: whether pieces may come from different holders. False where the holders' data could differ: then
            the lowest rank writes all of it.
    """

    box: Box
    itemsize: int
    holders: tuple[int, ...]
    divisible: bool = True

    def __post_init__(self) -> None:
        if not self.holders:
            raise ValueError(f"box {self.box} is held by no process")

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.itemsize


@dataclass(frozen=True)
class Piece:
    """Part of a claim, and the rank that writes it."""

    claim: int
    box: Box
    rank: int


def assign(claims: Sequence[Claim]) -> list[Piece]:
    """Give every element of every claim to exactly one of its holders, with their bytes balanced.

    Deterministic: equal claims give equal pieces. Pieces come in the order of the claims.
    """
    load: dict[int, int] = defaultdict(int)
    pieces: list[Piece] = []
    shared: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, claim in enumerate(claims):
        if len(claim.holders) > 1 and claim.divisible:
            shared[claim.holders].append(number)
        else:
            pieces.append(Piece(number, claim.box, claim.holders[0]))
            load[claim.holders[0]] += claim.nbytes
    # Boxes that few processes hold leave least choice and go first.
    for holders in sorted(shared, key=lambda holders: (len(holders), holders)):
        pieces.extend(_wrap_around(shared[holders], claims, holders, load))
    return sorted(pieces, key=lambda piece: piece.claim)


def _wrap_around(
    numbers: Sequence[int], claims: Sequence[Claim], holders: tuple[int, ...], load: dict[int, int]
) -> Iterator[Piece]:
    total = sum(claims[number].nbytes for number in numbers)
    level = _level([load[rank] for rank in holders], total)
    line = iter(holders)
    rank = next(line)
    for number in numbers:
        claim = claims[number]
        row = _row(claim, total * _SLACK / len(holders))
        done = 0
        while done < claim.box.volume:
            cut = _cut(done, claim, (level - load[rank]) / claim.itemsize, row)
            if rank == holders[-1]:
                cut = claim.box.volume
            for box in boxes_of_range(claim.box, done, cut):
                yield Piece(number, box, rank)
            load[rank] += (cut - done) * claim.itemsize
            done = cut
            if done < claim.box.volume or (load[rank] >= level and rank != holders[-1]):
                rank = next(line)
        if claim.box.volume == 0:
            yield Piece(number, claim.box, rank)


def _cut(done: int, claim: Claim, room: float, row: int) -> int:
    """The element of the claim up to which a holder with ``room`` elements to spare takes it from ``done`` on."""
    volume = claim.box.volume
    cut = min(volume, max(done, round((done + room) / row) * row))
    smallest = math.ceil(_SMALLEST_PIECE / claim.itemsize)
    if cut - done < smallest or volume - cut < smallest:
        # Too small to be cut here: all of the rest goes to the side on which most of it lies.
        return volume if room >= (volume - done) / 2 else done
    return cut


def _row(claim: Claim, slack: float) -> int:
    """Elements of the largest row of the box that is at most ``slack`` bytes."""
    sizes = claim.box.sizes
    rows = (math.prod(sizes[depth:]) for depth in range(1, len(sizes) + 1))
    return next((row for row in rows if 0 < row * claim.itemsize <= slack), 1)


def _level(loads: Sequence[int], total: int) -> float:
    """The level that vessels filled to ``loads`` reach when ``total`` more is poured into them."""
    ordered = sorted(loads)
    for count in range(1, len(ordered) + 1):
        level = (total + sum(ordered[:count])) / count
        if count == len(ordered) or level <= ordered[count]:
            break
    return level


def boxes_of_range(box: Box, start: int, stop: int) -> Iterator[Box]:
    """The elements ``start`` to ``stop`` of a box in row-major order, as at most 2 * d - 1 boxes."""
    if start >= stop:
        return
    if not box.sizes:
        yield box
        return
    offset, rest = box.offsets[0], Box(box.offsets[1:], box.sizes[1:])
    row = rest.volume
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        yield from _in_row(offset + last, rest, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(offset + first - 1, rest, start - (first - 1) * row, row)
    if first < last:
        yield Box((offset + first, *rest.offsets), (last - first, *rest.sizes))
    if last * row < stop:
        yield from _in_row(offset + last, rest, 0, stop - last * row)


def _in_row(index: int, rest: Box, start: int, stop: int) -> Iterator[Box]:
    for part in boxes_of_range(rest, start, stop):
        yield Box((index, *part.offsets), (1, *part.sizes))

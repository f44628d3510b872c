"""Which process writes which box.

Every process says which boxes it holds; a box that several hold needs one writer. Bytes are balanced with
McNaughton's wrap-around rule (Management Science 6(1), 1959): compute the level to which all holders can be filled,
lay the boxes end to end and cut the line at each holder's level. A group of n holders costs at most n - 1 cuts,
however many boxes it has, and each piece is a contiguous range of the box's rows.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_xla_ckpt.layout.box import Box

# Claims smaller than this are not worth a second item in a file: they go whole to whoever writes least.
_WORTH_CUTTING = 8192  # bytes
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


def assign(claims: Sequence[Claim], written: Mapping[int, int] | None = None) -> list[Piece]:
    """Give every element of every claim to exactly one of its holders, with their bytes balanced.

    Args:
        claims: what is to be written.
        written: bytes that a rank writes anyway.

    Returns:
        The pieces in the order of the claims. Equal arguments give equal pieces.
    """
    load: dict[int, int] = defaultdict(int, written or {})
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
        pieces.extend(_share(shared[holders], claims, holders, load))
    return sorted(pieces, key=lambda piece: piece.claim)


def _share(
    numbers: Sequence[int], claims: Sequence[Claim], holders: tuple[int, ...], load: dict[int, int]
) -> Iterator[Piece]:
    large = [number for number in numbers if claims[number].nbytes >= _WORTH_CUTTING]
    for piece in _wrap_around(large, claims, holders, load):
        load[piece.rank] += piece.box.volume * claims[piece.claim].itemsize
        yield piece
    for number in sorted(set(numbers) - set(large), key=lambda number: (-claims[number].nbytes, number)):
        rank = min(holders, key=lambda rank: (load[rank], rank))
        load[rank] += claims[number].nbytes
        yield Piece(number, claims[number].box, rank)


def _wrap_around(
    numbers: Sequence[int], claims: Sequence[Claim], holders: tuple[int, ...], load: Mapping[int, int]
) -> Iterator[Piece]:
    total = sum(claims[number].nbytes for number in numbers)
    level = _level([load[rank] for rank in holders], total)
    # Where each holder's part of the line ends, in bytes from the line's beginning; the last takes what is left.
    ends = list(itertools.accumulate(max(0.0, level - load[rank]) for rank in holders[:-1]))
    ends.append(math.inf)
    turn, start = 0, 0
    for number in numbers:
        claim = claims[number]
        row = _row(claim, total * _SLACK / len(holders))
        done = 0
        while done < claim.box.volume:
            room = (ends[turn] - start) / claim.itemsize
            cut = claim.box.volume if room >= claim.box.volume else max(done, round(room / row) * row)
            for box in boxes_of_range(claim.box, done, cut):
                yield Piece(number, box, holders[turn])
            done = cut
            turn += done < claim.box.volume
        start += claim.nbytes


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

"""The choice of the rank that writes each box.

Every rank tells which boxes it holds. A box that several ranks hold needs one writer. Bytes are balanced with
McNaughton's wrap-around rule (Management Science 6(1), 1959): compute the level to which all holders can be filled, lay
the boxes end to end, and cut the line at each holder's level. A group of n holders needs at most n - 1 cuts, however
many boxes it has. Each holder writes a contiguous range of a box's rows.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_xla_ckpt.layout.box import Box

# Bytes. A smaller claim is not worth a second item in a file. The holder with the fewest bytes writes all of it.
_WORTH_CUTTING = 8192
# Share of a holder's bytes by which a cut may miss the level, to keep whole rows together.
_SLACK = 0.01


@dataclass(frozen=True)
class Claim:
    """A box, and the ranks that hold its data.

    Args:
        box: the region of the tensor.
        itemsize: bytes of one element.
        holders: the ranks that could write the box, ascending.
        divisible: whether several holders may write parts of the box; default True. False if the holders' data may
            differ: then the lowest rank writes the whole box.

    Raises:
        ValueError: no rank holds the box.
    """

    box: Box
    itemsize: int
    holders: tuple[int, ...]
    divisible: bool = True

    def __post_init__(self) -> None:
        if not self.holders:
            raise ValueError(f"no rank holds the box {self.box}")

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.itemsize


@dataclass(frozen=True)
class Assignment:
    """The whole or a part of a claim's box, and the rank that writes it.

    Args:
        claim: position of the claim in the list of claims.
        box: the region to write.
        rank: the rank that writes the region.
    """

    claim: int
    box: Box
    rank: int


def assign(claims: Sequence[Claim], written: Mapping[int, int] | None = None) -> list[Assignment]:
    """Assign every element of every claim to one of its holders, so that the ranks' bytes are balanced.

    Args:
        claims: the boxes to write.
        written: bytes that each rank writes besides the claims; default: none.

    Returns:
        The assignments, in the order of the claims. Equal arguments give equal assignments.
    """
    load: dict[int, int] = defaultdict(int, written or {})
    assignments: list[Assignment] = []
    shared: dict[tuple[int, ...], list[int]] = defaultdict(list)
    sizes = [claim.nbytes for claim in claims]
    for number, claim in enumerate(claims):
        if len(claim.holders) > 1 and claim.divisible:
            shared[claim.holders].append(number)
        else:
            assignments.append(Assignment(number, claim.box, claim.holders[0]))
            load[claim.holders[0]] += sizes[number]
    # Boxes that few ranks hold leave the least choice, so they go first.
    for holders in sorted(shared, key=lambda holders: (len(holders), holders)):
        assignments.extend(_share(shared[holders], claims, sizes, holders, load))
    return sorted(assignments, key=lambda assignment: assignment.claim)


def _share(
    numbers: Sequence[int],
    claims: Sequence[Claim],
    sizes: Sequence[int],
    holders: tuple[int, ...],
    load: dict[int, int],
) -> Iterator[Assignment]:
    """Assign claims that all have the same holders, and add the bytes to ``load``. ``sizes`` has each claim's bytes."""
    large = [number for number in numbers if sizes[number] >= _WORTH_CUTTING]
    for assignment in _wrap_around(large, claims, sizes, holders, load):
        load[assignment.rank] += assignment.box.volume * claims[assignment.claim].itemsize
        yield assignment
    for number in sorted(set(numbers) - set(large), key=lambda number: (-sizes[number], number)):
        rank = min(holders, key=lambda rank: (load[rank], rank))
        load[rank] += sizes[number]
        yield Assignment(number, claims[number].box, rank)


def _wrap_around(
    numbers: Sequence[int],
    claims: Sequence[Claim],
    sizes: Sequence[int],
    holders: tuple[int, ...],
    load: Mapping[int, int],
) -> Iterator[Assignment]:
    """Lay the claims end to end, and cut the line at each holder's level."""
    total = sum(sizes[number] for number in numbers)
    level = _level([load[rank] for rank in holders], total)
    # Where each holder's part of the line ends, in bytes from the start of the line. The last holder takes the rest.
    ends = list(itertools.accumulate(max(0.0, level - load[rank]) for rank in holders[:-1]))
    ends.append(math.inf)
    turn, start = 0, 0
    for number in numbers:
        claim = claims[number]
        if ends[turn] - start >= sizes[number]:
            yield Assignment(number, claim.box, holders[turn])
        else:
            volume, row, done = claim.box.volume, _row(claim, total * _SLACK / len(holders)), 0
            while done < volume:
                room = (ends[turn] - start) / claim.itemsize
                cut = volume if room >= volume else max(done, round(room / row) * row)
                for box in boxes_of_range(claim.box, done, cut):
                    yield Assignment(number, box, holders[turn])
                done = cut
                turn += done < volume
        start += sizes[number]


def _row(claim: Claim, slack: float) -> int:
    """Return the number of elements in the largest row of the box that has at most ``slack`` bytes."""
    sizes = claim.box.sizes
    rows = (math.prod(sizes[depth:]) for depth in range(1, len(sizes) + 1))
    return next((row for row in rows if 0 < row * claim.itemsize <= slack), 1)


def _level(loads: Sequence[int], total: int) -> float:
    """Return the bytes that each holder has in the end, if ``total`` bytes are spread to level out ``loads``.

    Holders that already have more than this keep what they have.
    """
    ordered = sorted(loads)
    for count in range(1, len(ordered) + 1):
        level = (total + sum(ordered[:count])) / count
        if count == len(ordered) or level <= ordered[count]:
            break
    return level


def boxes_of_range(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield the elements ``start`` to ``stop`` of a box in row-major order, as at most 2 * d - 1 boxes."""
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

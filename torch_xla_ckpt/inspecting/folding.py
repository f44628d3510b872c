"""Keys that are alike on one line: ``layers.{0..31}.weight`` for 32 keys of one shape."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
_MOST_RANGES = 8  # ranges of numbers in one pair of braces; more of them are cut
# Whole parts between dots that are numbers as programs write them, so that a number gives the same text again.
_NUMBERS = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")


class Fold(NamedTuple, Generic[T]):
    """One line for several keys.

    Args:
        name: the pattern of the keys; the key itself if it is only one.
        members: the keys' values, in their order.
    """

    name: str
    members: tuple[T, ...]


def fold(items: Iterable[T], key: Callable[[T], str], kind: Callable[[T], Hashable]) -> list[Fold[T]]:
    """Join items whose keys differ only in numbers between dots, and that are of the same kind.

    Args:
        items: the items.
        key: returns an item's key.
        kind: returns what must be equal for two items to be joined.

    Returns:
        The lines, each at the place of its first member.
    """
    groups: dict[tuple[tuple[str, ...], Hashable], dict[tuple[int, ...], tuple[int, T]]] = {}
    for position, item in enumerate(items):
        parts = _NUMBERS.split(key(item))  # text and numbers take turns
        group = tuple(parts[::2]), kind(item)
        members = groups.get(group)
        if members is None:
            members = groups[group] = {}
        members[tuple(map(int, parts[1::2]))] = position, item
    folds: list[tuple[int, Fold[T]]] = []
    for (texts, _), members in groups.items():
        products = _products(sorted(members))
        for ranges in products:
            if len(products) == 1:
                inside = list(members.values())
            else:
                inside = sorted((members[numbers] for numbers in itertools.product(*ranges)), key=lambda pair: pair[0])
            name = "".join(itertools.chain.from_iterable(zip(texts, [*map(braces, ranges), ""])))
            folds.append((inside[0][0], Fold(name, tuple(item for _, item in inside))))
    folds.sort(key=lambda pair: pair[0])
    return [one for _, one in folds]


def _products(rows: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Split sorted tuples of numbers into products of sets of numbers."""
    if not rows or not rows[0]:
        return [()] if rows else []
    if len(rows[0]) == 1:
        return [(tuple(number for (number,) in rows),)]
    tails: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in rows:
        tails.setdefault(first, []).append(tuple(rest))
    by_tail: dict[tuple[tuple[tuple[int, ...], ...], ...], list[int]] = {}
    for first, rest_rows in tails.items():
        by_tail.setdefault(tuple(_products(rest_rows)), []).append(first)
    return [(tuple(firsts), *product) for products, firsts in by_tail.items() for product in products]


def braces(numbers: Sequence[int]) -> str:
    """Return ascending numbers as a shell's brace expression: ``{0..31}``, ``{0..3,8}``, ``{0..90..9}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    pieces = []
    at = 0
    while at < len(numbers):
        end = at + 1
        step = numbers[end] - numbers[at] if end < len(numbers) else 0
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if end - at > 2 or (end - at == 2 and step == 1):
            suffix = "" if step == 1 else f"..{step}"
            pieces.append(f"{numbers[at]}..{numbers[end - 1]}{suffix}")
        else:
            end = at + 1
            pieces.append(str(numbers[at]))
        at = end
    if len(pieces) > _MOST_RANGES:
        pieces[_MOST_RANGES - 1 : -1] = ["..."]
    return "{" + ",".join(pieces) + "}"

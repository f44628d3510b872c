"""Keys that are alike on one line: ``layers.{0..31}.weight`` for 32 keys of one shape."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
_MOST_RANGES = 8  # ranges of numbers in one pair of braces; more of them are cut


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
    groups: dict[Hashable, dict[tuple[int, ...], T]] = {}
    positions: dict[int, int] = {}
    templates: dict[Hashable, list[str]] = {}
    for position, item in enumerate(items):
        parts = key(item).split(".")
        numbers = tuple(int(part) for part in parts if _is_number(part))
        template = tuple("" if _is_number(part) else part for part in parts)
        group: Hashable = (template, kind(item))
        groups.setdefault(group, {})[numbers] = item
        templates.setdefault(group, parts)
        positions[id(item)] = position
    folds: list[tuple[int, Fold[T]]] = []
    for group, members in groups.items():
        for ranges in _products(sorted(members)):
            inside = [members[numbers] for numbers in _expanded(ranges)]
            inside.sort(key=lambda item: positions[id(item)])
            folds.append((positions[id(inside[0])], Fold(_named(templates[group], ranges), tuple(inside))))
    folds.sort(key=lambda pair: pair[0])
    return [one for _, one in folds]


def _is_number(part: str) -> bool:
    """Whether a part of a key is a number as programs write it, so that the number gives the same text again."""
    return part.isascii() and part.isdigit() and len(part) < 19 and (part == "0" or part[0] != "0")


def _products(rows: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Split sorted tuples of numbers into products of sets of numbers."""
    if not rows or not rows[0]:
        return [()] if rows else []
    tails: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in rows:
        tails.setdefault(first, []).append(tuple(rest))
    by_tail: dict[tuple[tuple[tuple[int, ...], ...], ...], list[int]] = {}
    for first, rest_rows in tails.items():
        by_tail.setdefault(tuple(_products(rest_rows)), []).append(first)
    return [(tuple(firsts), *product) for products, firsts in by_tail.items() for product in products]


def _expanded(ranges: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = [()]
    for numbers in ranges:
        rows = [(*row, number) for row in rows for number in numbers]
    return rows


def _named(parts: Sequence[str], ranges: Sequence[tuple[int, ...]]) -> str:
    left = iter(ranges)
    return ".".join(braces(next(left)) if _is_number(part) else part for part in parts)


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

"""Treemaps: sizes as areas. The tiles are laid out by Bruls, Huizing and van Wijk's squarified algorithm (2000)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MOST_TILES = 600
_COLOURED_LEVELS = 2
_SMALLEST = 24.0  # units of area below which a branch is one tile


class Tile(NamedTuple):
    """A tile of a treemap.

    Args:
        name: the key, or the part of keys that a branch shares.
        nbytes: its size.
        left, top, width, height: its place.
        hue: a number that the tiles of one branch share, two levels below the top.
    """

    name: str
    nbytes: int
    left: float
    top: float
    width: float
    height: float
    hue: int


class _Branch(NamedTuple):
    prefix: str
    keys: Sequence[tuple[str, int]]
    hue: int
    depth: int

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.keys)


def treemap(sizes: Sequence[tuple[str, int]], width: float, height: float) -> list[Tile]:
    """Return the tiles of a treemap: branches with a common part of their keys lie together.

    Args:
        sizes: key and size of each value. Values of size 0 get no tile.
        width, height: the size of the map.
    """
    whole = _Branch("", [(key, size) for key, size in sizes if size > 0], 0, 0)
    waiting = [(whole, 0.0, 0.0, float(width), float(height))] if whole.keys else []
    tiles: list[Tile] = []
    while waiting:
        branch, left, top, wide, high = waiting.pop(0)
        children = _children(branch)
        if len(children) < 2 or wide * high < _SMALLEST or len(tiles) + len(waiting) + len(children) > _MOST_TILES:
            name = (
                branch.keys[0][0] if len(branch.keys) == 1 else f"{branch.prefix.rstrip('.')} ({len(branch.keys)} keys)"
            )
            tiles.append(Tile(name, branch.nbytes, left, top, wide, high, branch.hue))
            continue
        waiting += _placed(sorted(children, key=lambda one: -one.nbytes), left, top, wide, high)
    return tiles


def _children(branch: _Branch) -> list[_Branch]:
    """Return the branches of the next level at which keys differ."""
    prefix = branch.prefix
    if len(branch.keys) < 2:
        return []
    while True:
        groups: dict[str, list[tuple[str, int]]] = {}
        for key, size in branch.keys:
            part, dot, _ = key[len(prefix) :].partition(".")
            groups.setdefault(prefix + part + dot, []).append((key, size))
        if len(groups) > 1 or prefix in groups or not next(iter(groups)).endswith("."):
            break
        prefix = next(iter(groups))
    depth = branch.depth + 1
    return [
        _Branch(name, keys, branch.hue * 5 + n if depth <= _COLOURED_LEVELS else branch.hue, depth)
        for n, (name, keys) in enumerate(groups.items())
    ]


Placed = tuple[_Branch, float, float, float, float]


def _placed(branches: Sequence[_Branch], left: float, top: float, wide: float, high: float) -> list[Placed]:
    """Return each branch with its place, row by row along the shorter side. Branches must descend in size."""
    placed: list[Placed] = []
    scale = wide * high / sum(one.nbytes for one in branches)
    row: list[_Branch] = []
    for branch in branches:
        side = min(wide, high)
        if row and _worst([*row, branch], side, scale) > _worst(row, side, scale):
            left, top, wide, high = _lay(placed, row, left, top, wide, high, scale)
            row = []
        row.append(branch)
    _lay(placed, row, left, top, wide, high, scale)
    return placed


def _worst(row: Sequence[_Branch], side: float, scale: float) -> float:
    """Return the largest ratio of a tile's sides in a row."""
    areas = [one.nbytes * scale for one in row]
    total = sum(areas)
    return max(side * side * max(areas) / total**2, total**2 / (side * side * min(areas))) if side else 0.0


def _lay(
    placed: list[Placed], row: Sequence[_Branch], left: float, top: float, wide: float, high: float, scale: float
) -> tuple[float, float, float, float]:
    """Place a row along the shorter side, and return what is left of the area."""
    area = sum(one.nbytes for one in row) * scale
    is_column = wide >= high
    depth = area / (high if is_column else wide) if min(wide, high) else 0.0
    at = top if is_column else left
    for one in row:
        length = one.nbytes * scale / depth if depth else 0.0
        placed.append((one, left, at, depth, length) if is_column else (one, at, top, length, depth))
        at += length
    return (left + depth, top, wide - depth, high) if is_column else (left, top + depth, wide, high - depth)

"""Recorded shardings: XLA's text for people, read back into the boxes that each device held."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import numpy as np

from torch_xla_ckpt.layout import Box

# {devices=[4,2]0,1,2,3,4,5,6,7}   {devices=[2,1,4]<=[2,4]T(1,0) last_tile_dim_replicate}
_TILED = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:(?P<list>\d[\d,]*)|<=\[(?P<reshape>[\d,]+)\](?:T\((?P<transpose>[\d,]+)\))?)"
    r"(?P<rest>[^}]*(?:\{[^}]*\})?[^}]*)\}"
)
_MOST_DEVICES = 1 << 20  # a text that somebody else wrote must not take all memory


@dataclass(frozen=True)
class Tiling:
    """How devices share a tensor.

    Args:
        tiles: number of tiles in each dimension.
        copies: number of devices that hold each tile.
        devices: the device numbers, tile by tile in row-major order, the copies of a tile one after the other.
    """

    tiles: tuple[int, ...]
    copies: int
    devices: tuple[int, ...]

    def __str__(self) -> str:
        cut = "x".join(map(str, self.tiles)) or "whole"
        return cut if self.copies == 1 else f"{cut}, {self.copies} copies"

    def boxes(self, shape: tuple[int, ...]) -> list[tuple[int, Box]]:
        """Return the box of each device, without padding. Boxes may be empty where the tensor is small."""
        steps = [math.ceil(n / tiles) for n, tiles in zip(shape, self.tiles)]
        found = []
        positions = itertools.product(*map(range, self.tiles))
        for number, position in enumerate(positions):
            offsets = tuple(min(at * step, n) for at, step, n in zip(position, steps, shape))
            sizes = tuple(min(step, n - o) for o, step, n in zip(offsets, steps, shape))
            for copy in range(self.copies):
                found.append((self.devices[number * self.copies + copy], Box(offsets, sizes)))
        return found


def tiling_of(sharding: str | None, ndim: int) -> Tiling | None:
    """Return the tiling that a recorded sharding describes; None if it describes none.

    Args:
        sharding: XLA's text, such as ``{devices=[4,2]<=[8]}``.
        ndim: number of dimensions of the tensor.
    """
    match = _TILED.fullmatch(sharding or "")
    if match is None:
        return None
    tiles = _numbers(match["tiles"])
    count = math.prod(tiles)
    if not 0 < count <= _MOST_DEVICES or not ndim <= len(tiles) <= ndim + 2:
        return None
    devices = np.array(_numbers(match["list"])) if match["list"] else _iota(match["reshape"], match["transpose"])
    if devices is None or devices.size != count:
        return None
    replicated = "replicate" in match["rest"]
    if len(tiles) > ndim and not replicated:
        return None
    return Tiling(tiles[:ndim], math.prod(tiles[ndim:]), tuple(devices.reshape(-1).tolist()))


def short_sharding(sharding: str | None, ndim: int) -> str:
    """Return a few characters for a table: "4x2", "4x1, 2 copies", "replicated" or "" if nothing was recorded."""
    tiling = tiling_of(sharding, ndim)
    if tiling is not None:
        return str(tiling)
    return {None: "", "{replicated}": "replicated"}.get(sharding, (sharding or "")[:24])


def _iota(reshape: str, transpose: str | None) -> np.ndarray | None:  # type: ignore[type-arg]
    dims = _numbers(reshape)
    if not 0 < math.prod(dims) <= _MOST_DEVICES:
        return None
    devices = np.arange(math.prod(dims)).reshape(dims)
    order = _numbers(transpose) if transpose else tuple(range(len(dims)))
    return devices.transpose(order) if sorted(order) == list(range(len(dims))) else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)

"""Where a saved tensor lies: its chunks and files, and the boxes that devices held when it was saved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.inspecting.reading import stored
from torch_xla_ckpt.inspecting.shardings import tiling_of
from torch_xla_ckpt.inspecting.text import plural, shown, table
from torch_xla_ckpt.inspecting.words import shape_words
from torch_xla_ckpt.layout import Box

_MOST_CELLS = 16  # rows and columns of the drawing
_RANK = re.compile(r"__(\d+)_\d+")


@dataclass(frozen=True)
class Chunk:
    """A stored chunk of a tensor.

    Args:
        box: the region of the tensor.
        file: the data file; "" if no file holds the chunk.
        offset, length: the place of the chunk's item in the file, in bytes.
    """

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Layout:
    """Where a tensor lies.

    Args:
        key: the tensor's key.
        shape: the tensor's shape.
        sharding: the sharding when it was saved, in XLA's words; "" if it was not recorded.
        devices: the box of each device, by device number; empty if the sharding was not recorded.
        chunks: the stored chunks.
    """

    key: str
    shape: tuple[int, ...]
    sharding: str
    devices: Mapping[int, Box]
    chunks: tuple[Chunk, ...]

    def holders(self) -> dict[Box, str]:
        """Return who held each region: the devices if they were recorded, else the ranks that wrote the chunks."""
        found: dict[Box, list[str]] = {}
        if self.devices:
            for device, box in sorted(self.devices.items()):
                found.setdefault(box, []).append(str(device))
            return {box: _ranges(names) for box, names in found.items() if box.volume}
        return {one.box: f"rank {match[1]}" if (match := _RANK.match(one.file)) else one.file for one in self.chunks}

    def __str__(self) -> str:
        what = "devices that held each box" if self.devices else "who wrote each chunk (no sharding was recorded)"
        lines = [f"{shown(self.key)}: {shape_words(self.shape)}, {what}"]
        if self.sharding:
            lines.append(f"  saved sharding  {shown(self.sharding)}")
        lines += [f"  {line}" for line in self._drawing().splitlines()]
        lines.append(f"  {plural(len(self.chunks), 'chunk')}:")
        rows = [(str(one.box), f"{one.length:,}", f"{one.offset:,}", one.file) for one in self.chunks]
        lines += [f"  {line}" for line in table(("box", "bytes", "offset", "file"), rows, {1, 2}).splitlines()]
        return "\n".join(lines)

    def _drawing(self) -> str:
        """Return a grid of the two dimensions that are cut most, or a list where a grid does not fit."""
        holders = self.holders()
        cuts = [sorted({box.offsets[dim] for box in holders}) for dim in range(len(self.shape))]
        split = [dim for dim, starts in enumerate(cuts) if len(starts) > 1]
        fits = len(split) <= 2 and all(len(starts) <= _MOST_CELLS for starts in cuts)
        if not fits or not self.shape:
            return table(("box", "held by"), [(str(box), who) for box, who in holders.items()])
        across = split[-1] if len(split) == 2 or (len(self.shape) > 1 and split) else None
        if across is not None and len(split) == 1 and across == 0:
            across = None
        down = next((dim for dim in split if dim != across), 0)
        cells: dict[tuple[int, int], str] = {}
        spans: dict[tuple[int, int], str] = {}
        for box, who in holders.items():
            column = box.offsets[across] if across is not None else 0
            cells[box.offsets[down], column] = who
            spans[down, box.offsets[down]] = _span(box, down)
            if across is not None:
                spans[across, column] = _span(box, across)
        columns = cuts[across] if across is not None else [0]
        head = ["", *(spans.get((across, c), "") if across is not None else "" for c in columns)]
        rows = [[spans.get((down, row), ""), *(cells.get((row, c), "") for c in columns)] for row in cuts[down]]
        return table(head, rows, {0})


def layout_of(metadata: Metadata, key: str) -> Layout:
    """Return where a tensor of a checkpoint lies.

    Args:
        metadata: DCP's metadata of the checkpoint.
        key: the key of a tensor.
    """
    saved = metadata.state_dict_metadata[key]
    assert isinstance(saved, TensorStorageMetadata)
    shape = tuple(saved.size)
    chunks = []
    sharding = ""
    for chunk in saved.chunks:
        if MetadataIndex(key, chunk.offsets) not in metadata.storage_data:
            chunks.append(Chunk(_dcp.box_of(chunk), "", 0, 0))
            continue
        item = stored(metadata, key, chunk.offsets)
        sharding = item.sharding or sharding
        chunks.append(Chunk(_dcp.box_of(chunk), item.relative_path, item.offset, item.length))
    tiling = tiling_of(sharding, len(shape))
    devices = dict(tiling.boxes(shape)) if tiling is not None else {}
    return Layout(key, shape, sharding, devices, tuple(chunks))


def _span(box: Box, dim: int) -> str:
    return f"{box.offsets[dim]}:{box.offsets[dim] + box.sizes[dim]}"


def _ranges(names: list[str]) -> str:
    """Return device numbers in a few characters: "0-3,8"."""
    numbers = np.array(sorted(map(int, names)))
    groups = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ",".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in groups)

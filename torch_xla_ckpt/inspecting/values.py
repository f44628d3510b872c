"""show: the values, the statistics and the layout of one key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_xla_ckpt.inspecting.layouts import Layout, layout_of
from torch_xla_ckpt.inspecting.objects import ObjectView, view_object
from torch_xla_ckpt.inspecting.opening import open_checkpoint
from torch_xla_ckpt.inspecting.reading import Values
from torch_xla_ckpt.inspecting.selecting import selected, selected_pieces
from torch_xla_ckpt.inspecting.slices import Region, parse_region, split_key
from torch_xla_ckpt.inspecting.statistics import Collector, Statistics
from torch_xla_ckpt.inspecting.text import plural, shown
from torch_xla_ckpt.inspecting.words import shape_words
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.reports import format_bytes
from torch_xla_ckpt.storage import PathLike

MOST_VALUES = 1000
"""Number of elements up to which a slice is shown in full."""
_CORNER = (4, 8)  # rows and columns that are shown of larger tensors


@dataclass(frozen=True)
class TensorView:
    """A tensor of a checkpoint, or a slice of it.

    Args:
        path: the checkpoint's folder.
        key: the tensor's key.
        dtype: the dtype, such as "float32".
        shape: the shape of the whole tensor.
        nbytes: bytes of the whole tensor.
        region: the slice that was asked for, as text; "" for the whole tensor.
        values_of: the slice that ``values`` holds. It is smaller than ``region`` if that has too many elements.
        values: elements as nested lists of numbers.
        statistics: statistics of the elements of ``region``; None if they were not asked for.
        bytes_read: bytes read from data files.
        layout: where the tensor lies, and which device held what.
    """

    path: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    region: str
    values_of: str
    values: Any
    statistics: Statistics | None
    bytes_read: int
    layout: Layout

    def __str__(self) -> str:
        shape = shape_words(self.shape)
        chunks = plural(len(self.layout.chunks), "chunk")
        lines = [f"{shown(self.key)}: {self.dtype} {shape}, {format_bytes(self.nbytes)} in {chunks}"]
        if self.layout.sharding:
            lines.append(f"  saved sharding  {shown(self.layout.sharding)}")
        if self.statistics is not None:
            where = f" of [{self.region}]" if self.region else ""
            lines.append(f"  statistics{where}  {self.statistics}")
        lines.append(f"  values of [{self.values_of}]" if self.values_of else "  values")
        text = np.array2string(
            np.array(self.values, dtype=object), formatter={"object": _number}, max_line_width=76, threshold=MOST_VALUES
        )
        return "\n".join([*lines, *(f"  {line}" for line in text.splitlines())])


def show(
    path: PathLike,
    key: str,
    *,
    statistics: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> TensorView | ObjectView:
    """Return a tensor of a checkpoint with its statistics, a slice of it, or an object.

    Reads the blocks that hold what is shown, in pieces of bounded size, and checks them.

    Args:
        path: a checkpoint, as for ``inspect``.
        key: a key, or a key and a slice, such as ``"model.weight[0:4, :8]"``.
        statistics: whether to read all elements and to compute their statistics. Default True.
        storage_options: options of the fsspec filesystem behind a URL. Default: none.

    Raises:
        CheckpointError: there is no checkpoint, no such key, or the slice does not fit the tensor.
        CorruptCheckpointError: the bytes are not what was written.
    """
    checkpoint = open_checkpoint(path, storage_options)
    values = Values(checkpoint)
    name, slices = split_key(key, values.metadata.state_dict_metadata)
    saved = values.entry(name)
    if not isinstance(saved, TensorStorageMetadata):
        nbytes = values.stored(name).length
        return view_object(checkpoint.location.url, name, values.object_bytes(name), nbytes)
    shape = tuple(saved.size)
    region = parse_region(slices, shape)
    corner = _corner(region)
    elements = selected(values, name, corner)
    found = None
    if statistics:
        found = _statistics(values, name, region, elements if corner == region else None)
    return TensorView(
        path=checkpoint.location.url,
        key=name,
        dtype=str(saved.properties.dtype).removeprefix("torch."),
        shape=shape,
        nbytes=math.prod(shape) * saved.properties.dtype.itemsize,
        region=(slices or "").strip(),
        values_of=_text(corner) if corner != region else (slices or "").strip(),
        values=_numbers(elements),
        statistics=found,
        bytes_read=values.bytes_read,
        layout=layout_of(values.metadata, name),
    )


def _corner(region: Region) -> Region:
    """Return the region itself, or its first rows and columns if it has too many elements."""
    if math.prod(region.sizes) <= MOST_VALUES:
        return region
    free = [dim for dim in range(len(region.steps)) if dim not in region.dropped]
    most = dict(zip(reversed(free), reversed(_CORNER)))
    sizes = tuple(
        n if dim in region.dropped else min(n, (most.get(dim, 1) - 1) * step + 1)
        for dim, (n, step) in enumerate(zip(region.box.sizes, region.steps))
    )
    return region._replace(box=Box(region.box.offsets, sizes))


def _statistics(values: Values, key: str, region: Region, elements: torch.Tensor | None) -> Statistics:
    """Return the statistics of a region.

    Args:
        values: the checkpoint's values.
        key: the tensor's key.
        region: the region.
        elements: the region's elements, if they were read before.
    """
    collector = Collector(key)
    if elements is not None:
        collector.add(elements)
    else:
        for piece in selected_pieces(values, key, region):
            collector.add(piece.elements)
    return collector.result()


def _text(region: Region) -> str:
    parts = []
    for dim, (o, n, step) in enumerate(zip(region.box.offsets, region.box.sizes, region.steps)):
        parts.append(str(o) if dim in region.dropped else f"{o}:{o + n}" + (f":{step}" if step != 1 else ""))
    return ", ".join(parts)


def _numbers(tensor: torch.Tensor) -> Any:
    """Return elements as nested lists of Python numbers."""
    is_small_float = tensor.is_floating_point() and tensor.itemsize < 4
    return (tensor.float() if is_small_float else tensor).tolist()


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, (float, complex)) else str(value)

"""The table of what a checkpoint holds."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


@dataclass(frozen=True)
class Kind:
    """What the keys that share a row of the table have in common."""

    key: str
    shape: str
    dtype: str
    sharding: str
    chunks: int


def contents(checkpoint: Path, layouts: Mapping[str, Any]) -> Table:
    """A table of the checkpoint's metadata. Layers share rows, and so do AdamW's two moments.

    Args:
        checkpoint: its folder.
        layouts: of the saved tensors by key, with the shards of each.
    """
    metadata = FileSystemReader(checkpoint).read_metadata()
    rows: dict[Kind, list[int]] = defaultdict(list)
    for key, nbytes in stored_bytes(metadata).items():
        rows[kind_of(key, metadata, layouts)].append(nbytes)

    files = ", ".join(f"{file.name} ({file.stat().st_size:,} bytes)" for file in sorted(checkpoint.iterdir()))
    table = Table(
        title="What was saved", caption=files, box=SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True
    )
    table.title_justify = table.caption_justify = "left"
    table.add_column("key", overflow="fold")
    table.add_column("keys", justify="right", no_wrap=True)
    for name in ("shape", "dtype", "tiles on 4 x 2"):
        table.add_column(name, no_wrap=True)
    for name in ("chunks", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, sizes in rows.items():
        chunks = str(kind.chunks * len(sizes))
        row = (kind.key, str(len(sizes)), kind.shape, kind.dtype, kind.sharding, chunks, f"{sum(sizes):,}")
        table.add_row(*row)
    table.add_section()
    keys = sum(len(sizes) for sizes in rows.values())
    total_chunks = sum(kind.chunks * len(sizes) for kind, sizes in rows.items())
    table.add_row("all", str(keys), "", "", "", str(total_chunks), f"{sum(map(sum, rows.values())):,}")
    return table


def stored_bytes(metadata: Metadata) -> dict[str, int]:
    """By key: of a tensor its elements', of an object the file's, which includes ``torch.save``'s frame."""
    in_file: dict[str, int] = defaultdict(int)
    for index, info in metadata.storage_data.items():
        in_file[index.fqn] += info.length
    return {
        key: sum(math.prod(chunk.sizes) for chunk in saved.chunks) * saved.properties.dtype.itemsize
        if isinstance(saved, TensorStorageMetadata)
        else in_file[key]
        for key, saved in metadata.state_dict_metadata.items()
    }


def kind_of(key: str, metadata: Metadata, layouts: Mapping[str, Any]) -> Kind:
    saved = metadata.state_dict_metadata[key]
    if not isinstance(saved, TensorStorageMetadata):
        family, dot, _ = key.partition(".")
        return Kind(family + (dot and ".…"), "", "object", "", 1)
    family = re.sub(r"(layers|state)\.\d+\.", r"\1.*.", key)
    family = re.sub(r"exp_avg(_sq)?$", "exp_avg(_sq)", family)
    dtype = str(saved.properties.dtype).removeprefix("torch.")
    return Kind(family, " x ".join(map(str, saved.size)) or "scalar", dtype, in_words(layouts[key]), len(saved.chunks))


def in_words(layout: Mapping[str, Any]) -> str:
    """A tensor's sharding, read off its shards: tiles in each dimension, and replicas."""
    shards = layout["shards"]
    if len(shards) == 1:
        return "host"
    corners = {tuple(shard["offsets"]) for shard in shards}
    replicas = len(shards) // len(corners)
    if len(corners) == 1:
        return f"whole, {replicas} replicas"
    tiles = " x ".join(str(len(set(starts))) for starts in zip(*corners))
    return tiles + (f", {replicas} replicas" if replicas > 1 else "")

"""The table of a checkpoint's contents."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table


@dataclass(frozen=True)
class Kind:
    """The properties that all keys in one row of the table share."""

    key: str
    shape: str
    dtype: str
    sharding: str
    chunks: int


def contents(checkpoint: Path, items: Mapping[str, Mapping[str, Any]], layouts: Mapping[str, Any]) -> Table:
    """Return a table of a checkpoint. Layers share rows, and so do AdamW's two moments.

    Args:
        checkpoint: the checkpoint's folder.
        items: shape, dtype, chunks and bytes by key, as ``plain.items`` returns them.
        layouts: the layouts of the saved tensors by key.
    """
    rows: dict[Kind, list[int]] = defaultdict(list)
    for key, item in items.items():
        rows[kind_of(key, item, layouts)].append(item["bytes"])

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


def kind_of(key: str, item: Mapping[str, Any], layouts: Mapping[str, Any]) -> Kind:
    if "shape" not in item:
        family, dot, _ = key.partition(".")
        return Kind(family + (dot and ".…"), "", "object", "", 1)
    family = re.sub(r"(layers|state)\.\d+\.", r"\1.*.", key)
    family = re.sub(r"exp_avg(_sq)?$", "exp_avg(_sq)", family)
    shape = " x ".join(map(str, item["shape"])) or "scalar"
    return Kind(family, shape, item["dtype"], in_words(layouts[key]), item["chunks"])


def in_words(layout: Mapping[str, Any]) -> str:
    """Return a tensor's sharding, computed from its shards: the tiles in each dimension, and the replicas."""
    shards = layout["shards"]
    if len(shards) == 1:
        return "host"
    corners = {tuple(shard["offsets"]) for shard in shards}
    replicas = len(shards) // len(corners)
    if len(corners) == 1:
        return f"whole, {replicas} replicas"
    tiles = " x ".join(str(len(set(starts))) for starts in zip(*corners))
    return tiles + (f", {replicas} replicas" if replicas > 1 else "")

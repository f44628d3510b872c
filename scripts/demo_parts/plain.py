"""Open the demo's checkpoint with stock PyTorch alone, and print its contents as one line of JSON.

    python -m demo_parts.plain CHECKPOINT

The files are read by stock ``torch.distributed.checkpoint``, without any planner or storage class of this package.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from demo_parts.digests import digests
from demo_parts.waiting import wait_for_commit


def load_everything(path: Path, metadata: Metadata) -> dict[str, Any]:
    """Load all items of a checkpoint by key; tensors are whole and in host memory."""
    state: dict[str, Any] = {
        key: torch.empty(item.size, dtype=item.properties.dtype) if isinstance(item, TensorStorageMetadata) else None
        for key, item in metadata.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def items(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """Return shape, dtype, number of chunks and bytes by key; an object has bytes only."""
    in_file: dict[str, int] = defaultdict(int)
    for index, info in metadata.storage_data.items():
        in_file[index.fqn] += info.length
    found: dict[str, dict[str, Any]] = {}
    for key, saved in metadata.state_dict_metadata.items():
        found[key] = {"bytes": in_file[key]}  # of an object, with the frame that torch.save adds
        if isinstance(saved, TensorStorageMetadata):
            dtype = saved.properties.dtype
            nbytes = sum(torch.Size(chunk.sizes).numel() for chunk in saved.chunks) * dtype.itemsize
            described = {"shape": list(saved.size), "dtype": str(dtype).removeprefix("torch.")}
            found[key] = {**described, "chunks": len(saved.chunks), "bytes": nbytes}
    return found


def main() -> None:
    (path,) = map(Path, sys.argv[1:])
    for name in ("torch_xla", "torch_xla_ckpt"):
        if importlib.util.find_spec(name) is not None:
            raise SystemExit(f"{sys.executable} can import {name}, so opening the checkpoint here would prove nothing.")
    wait_for_commit(path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    found = digests(load_everything(path, metadata))
    event = {"event": "opened", "torch": torch.__version__, "digests": found, "items": items(metadata)}
    print(json.dumps(event))


if __name__ == "__main__":
    main()

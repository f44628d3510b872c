"""Opens the demo's checkpoint with nothing but PyTorch and prints what it found as one line of JSON.

    python scripts/demo_plain.py CHECKPOINT

This is stock ``torch.distributed.checkpoint``: no planner, no storage class, no import of ours touches the file.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from demo_digest import digests
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def load_everything(path: str) -> dict[str, Any]:
    """All items of a checkpoint by key, tensors whole and in host memory; the checkpoint says what there is."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(item.size, dtype=item.properties.dtype) if isinstance(item, TensorStorageMetadata) else None
        for key, item in saved.items()
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def main() -> None:
    (path,) = sys.argv[1:]
    for name in ("torch_xla", "torch_xla_ckpt"):
        if importlib.util.find_spec(name) is not None:
            raise SystemExit(f"{name} can be imported by {sys.executable}: this would prove nothing")
    found = digests(load_everything(path))
    print(json.dumps({"event": "opened", "torch": torch.__version__, "digests": found}))


if __name__ == "__main__":
    main()

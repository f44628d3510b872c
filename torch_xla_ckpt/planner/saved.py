"""What a checkpoint's metadata tells about its values: paths, order, kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from torch_xla_ckpt.serialization import MAX_DEPTH
from torch_xla_ckpt.state import Path

Saved = TensorStorageMetadata | BytesStorageMetadata
QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def paths_of(metadata: Metadata) -> Mapping[str, Path]:
    """Return the path in the state dict of each saved key, for the keys whose path the checkpoint records."""
    paths = metadata.planner_data
    return {key: path for key, path in paths.items() if _is_path(path)} if isinstance(paths, Mapping) else {}


def _is_path(path: object) -> bool:
    return (
        type(path) is tuple
        and 0 < len(path) <= MAX_DEPTH + 1
        and all(isinstance(element, str) or (type(element) is int and element >= 0) for element in path)
    )


def in_saved_order(keys: Sequence[str], paths: Mapping[str, Path]) -> list[str]:
    """Sort keys as the saved tree had them. Positions of lists ascend, even if several ranks saved the list.

    Args:
        keys: the keys to sort. Those without a path come last.
        paths: path of each saved key, in saved order.
    """
    wanted = set(keys)
    found = [key for key in paths if key in wanted]
    first_seen: dict[Path, int] = {}  # a number for each container, in the order in which the paths first name it
    for key in found:
        for depth in range(1, len(paths[key]) + 1):
            first_seen.setdefault(paths[key][:depth], len(first_seen))

    def sort_key(key: str) -> list[int]:
        path = paths[key]
        return [e if isinstance(e, int) else first_seen[path[: depth + 1]] for depth, e in enumerate(path)]

    return [*sorted(found, key=sort_key), *(key for key in keys if key not in paths)]


def is_quantized(saved: Saved) -> bool:
    """Whether only the integers of a quantized tensor were saved, without its scale and zero point."""
    return isinstance(saved, TensorStorageMetadata) and saved.properties.dtype in QUANTIZED


def describe_saved(saved: Saved) -> str:
    """Describe a value of the checkpoint in words."""
    if isinstance(saved, TensorStorageMetadata):
        lacking = ", quantized and saved without its scale and zero point" if is_quantized(saved) else ""
        return f"a tensor of shape {tuple(saved.size)}, {saved.properties.dtype}{lacking}"
    return "an object"

"""Target keys against saved keys: what fits, what does not, what is left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from torch_xla_ckpt.errors import MismatchError
from torch_xla_ckpt.planner.tree import Leaf

Saved = TensorStorageMetadata | BytesStorageMetadata


@dataclass(frozen=True)
class Mismatch:
    """A key of the target that the checkpoint cannot fill.

    ``kind`` is "missing" (the checkpoint lacks the key), "shape", or "type" (one is a tensor, the other is not).
    ``target`` and ``saved`` say what each side has.
    """

    key: str
    kind: Literal["missing", "shape", "type"]
    target: str
    saved: str

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"{self.key}: target has {self.target}, missing from the checkpoint"
        return f"{self.key}: target has {self.target}, checkpoint has {self.saved}"


@dataclass(frozen=True)
class Match:
    """The outcome for every key.

    Args:
        tensors: keys to load as tensors.
        objects: keys to load as objects.
        cast: keys whose dtype differs, with the saved and the target's dtype.
        unexpected: keys that the checkpoint has, under a top-level key of the target, and the target lacks.
        mismatches: keys that cannot be loaded.
    """

    tensors: tuple[str, ...]
    objects: tuple[str, ...]
    cast: Mapping[str, tuple[torch.dtype, torch.dtype]]
    unexpected: tuple[str, ...]
    mismatches: tuple[Mismatch, ...]

    def require_complete(self) -> None:
        """Refuse a load that would leave a part of the target unfilled.

        Raises:
            MismatchError: listing every mismatch.
        """
        if self.mismatches:
            raise MismatchError(
                f"{len(self.mismatches)} of the target's keys do not fit the checkpoint:\n  "
                + "\n  ".join(map(str, self.mismatches))
                + _hint(self.mismatches, self.unexpected)
                + "\nNothing was loaded. Change the target to what was saved, or take these keys out of it",
                self.mismatches,
            )


def match(target: Mapping[str, Leaf], metadata: Metadata) -> Match:
    """Compare the target's leaves with what was saved."""
    saved_items = metadata.state_dict_metadata
    tensors: list[str] = []
    objects: list[str] = []
    cast: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    mismatches: list[Mismatch] = []
    for key, leaf in target.items():
        saved = saved_items.get(key)
        kind = _compare(leaf, saved)
        if kind is not None:
            mismatches.append(
                Mismatch(key, kind, _describe_leaf(leaf), "nothing" if saved is None else _describe(saved))
            )
        elif isinstance(saved, TensorStorageMetadata):
            tensors.append(key)
            if saved.properties.dtype != leaf.value.dtype:
                cast[key] = saved.properties.dtype, leaf.value.dtype
        else:
            objects.append(key)
    return Match(tuple(tensors), tuple(objects), cast, _unexpected(target, metadata), tuple(mismatches))


def _compare(leaf: Leaf, saved: Saved | None) -> Literal["missing", "shape", "type"] | None:
    if saved is None:
        return "missing"
    if leaf.is_tensor != isinstance(saved, TensorStorageMetadata):
        return "type"
    if isinstance(saved, TensorStorageMetadata) and tuple(saved.size) != tuple(leaf.value.shape):
        return "shape"
    return None


def _unexpected(target: Mapping[str, Leaf], metadata: Metadata) -> tuple[str, ...]:
    """A target that names only "model" asks for that sub-tree; what else was saved is not requested."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    asked = {leaf.path[0] for leaf in target.values()}
    extra = (key for key in metadata.state_dict_metadata if key not in target)
    return tuple(key for key in extra if paths.get(key, (key,))[0] in asked)


def _hint(mismatches: Sequence[Mismatch], unexpected: Sequence[str]) -> str:
    missing = sum(mismatch.kind == "missing" for mismatch in mismatches)
    if not missing or not unexpected:
        return ""
    shown = ", ".join(unexpected[:10]) + (", ..." if len(unexpected) > 10 else "")
    return f"\nThe checkpoint has {len(unexpected)} keys that the target lacks: {shown}"


def _describe_leaf(leaf: Leaf) -> str:
    if leaf.is_tensor:
        return f"a tensor of shape {tuple(leaf.value.shape)}, {leaf.value.dtype}"
    return f"an object of type {type(leaf.value).__name__}"


def _describe(saved: Saved) -> str:
    if isinstance(saved, TensorStorageMetadata):
        return f"a tensor of shape {tuple(saved.size)}, {saved.properties.dtype}"
    return "an object"

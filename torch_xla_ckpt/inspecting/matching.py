"""What a load into a target would do with each key that the target and the checkpoint do not share as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.inspecting.words import entry_words, tensor_words
from torch_xla_ckpt.planner import Policy, match
from torch_xla_ckpt.state import Leaf, StateDictEditor, flatten

Change = Literal["cast", "created", "missing", "unexpected", "other shape", "other type"]


class KeyChange(NamedTuple):
    """A key that the target and the checkpoint do not share as it is, and what a load with default options does.

    Args:
        key: the key, in the target if it has it.
        change: "cast": the dtypes differ. "created": the target lacks it, and a load creates it in host memory.
            "unexpected": the target lacks it and has no place for it, so that a load leaves it out. "missing": the
            checkpoint lacks it. "other shape", "other type". The last three make a load fail.
        saved, target: the value on each side, in words; "" if there is none.
    """

    key: str
    change: Change
    saved: str
    target: str


class Matched(NamedTuple):
    """What a load into a target would do.

    Args:
        sources: the saved key for each key of the target that would be loaded or created.
        created: keys that the target lacks, and that would be created.
        changes: keys that the target and the checkpoint do not share as they are.
        not_requested: keys of the checkpoint in parts that the target does not name.
    """

    sources: Mapping[str, str]
    created: frozenset[str]
    changes: list[KeyChange]
    not_requested: list[str]


def matched(target: dict[Any, Any], metadata: Metadata) -> Matched:
    """Match a target with a checkpoint as a load with default options does."""
    saved = metadata.state_dict_metadata
    leaves = flatten(target)
    found = match(target, leaves, StateDictEditor(target), metadata, Policy())
    changes = []
    for one in found.mismatches:
        change: Change = "missing" if one.kind == "missing" else "other shape" if one.kind == "shape" else "other type"
        changes.append(KeyChange(one.key, change, entry_words(saved.get(one.key)), _leaf_words(leaves.get(one.key))))
    for key, outcome in found.outcomes.items():
        source = saved.get(outcome.renamed or key)
        if outcome.cast is not None:
            changes.append(KeyChange(key, "cast", entry_words(source), _leaf_words(leaves.get(key))))
        elif outcome.status in ("created", "unexpected"):
            changes.append(KeyChange(key, cast(Change, outcome.status), entry_words(source), ""))
    not_requested = [key for key, outcome in found.outcomes.items() if outcome.status == "not requested"]
    return Matched({**found.tensors, **found.objects}, frozenset(found.created), changes, not_requested)


def _leaf_words(leaf: Leaf | None) -> str:
    if leaf is None:
        return ""
    return tensor_words(leaf.value.dtype, leaf.value.shape) if leaf.is_tensor else "object"

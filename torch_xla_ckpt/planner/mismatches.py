"""Errors for keys of target and checkpoint that do not fit each other, with the remedy for each kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.errors import Mismatch, MismatchError, MismatchKind
from torch_xla_ckpt.planner.saved import describe_saved
from torch_xla_ckpt.reports import Outcome
from torch_xla_ckpt.state import Leaf

_REMEDIES: dict[MismatchKind, str] = {
    "missing": 'pass missing="warn" to keep the target\'s values for keys that the checkpoint lacks, or rename= if the '
    "checkpoint has them under other names",
    "shape": 'pass shape="keep" to keep the target\'s values for keys that have another shape',
    "type": "put a tensor into the target where the checkpoint has a tensor, and an object where it has an object",
    "dtype": 'pass dtype="cast" to convert values to the target\'s dtype; nothing can convert quantized values',
    "unexpected": 'pass unexpected="restore" to create keys that the target lacks, or "warn" to leave them out',
    "ranks": 'make each PerRank with resize="warn", so that ranks without saved state keep what they have',
}
"""What to do about each kind of mismatch, in the order in which an error lists the remedies."""


def mismatch_error(
    mismatches: Mapping[Mismatch, Sequence[int]], outcomes: Mapping[str, Outcome], processes: int = 1
) -> MismatchError:
    """Return the error that lists all mismatches.

    Args:
        mismatches: for each mismatch the ranks that found it; empty if the ranks do not matter.
        outcomes: the outcome of every key, for a hint at the keys that the user may have meant.
        processes: number of ranks; default 1.
    """
    lines = [
        f"{mismatch} ({_ranks(ranks)})" if 0 < len(ranks) < processes else str(mismatch)
        for mismatch, ranks in mismatches.items()
    ]
    kinds = {mismatch.kind for mismatch in mismatches}
    return MismatchError(
        f"{len(mismatches)} keys of target and checkpoint do not fit each other:\n  "
        + "\n  ".join(lines)
        + (_other_names(outcomes) if "missing" in kinds else "")
        + "\nNothing was loaded. Change the target to what was saved, or do one of these:\n  "
        + ";\n  ".join(_remedies(kinds)),
        tuple(mismatches),
    )


def _remedies(kinds: Collection[MismatchKind]) -> list[str]:
    remedies = [remedy for kind, remedy in _REMEDIES.items() if kind in kinds]
    return [*remedies, "leave keys out of the load with exclude=[...], which takes globs of whole keys"]


def _other_names(outcomes: Mapping[str, Outcome]) -> str:
    """List keys of the checkpoint that the target lacks: one of them may be a missing key under another name."""
    unused = [key for key, outcome in outcomes.items() if outcome.status in ("created", "unexpected")]
    if not unused:
        return ""
    shown = ", ".join(unused[:10]) + (", ..." if len(unused) > 10 else "")
    return f"\nThe checkpoint has {len(unused)} keys that the target lacks: {shown}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def require_same_kept_keys(outcomes: Sequence[Mapping[str, Outcome]], kept: Sequence[Sequence[Mismatch]]) -> None:
    """Check that no rank loads a key for which another rank keeps its value because the shapes differ.

    Args:
        outcomes: every rank's outcomes, by key.
        kept: every rank's keys whose shapes differ, under ``shape="keep"``.

    Raises:
        MismatchError: the ranks' targets have different shapes. The keys and ranks are named.
    """
    ranks: dict[Mismatch, list[int]] = {}
    for rank, own in enumerate(kept):
        for mismatch in own:
            ranks.setdefault(mismatch, []).append(rank)
    filled = ("loaded", "created")
    divided = [m for m in ranks if any(m.key in own and own[m.key].status in filled for own in outcomes)]
    if divided:
        raise MismatchError(
            f"{len(divided)} keys have the checkpoint's shape on some ranks and another shape on others:\n  "
            + "\n  ".join(f"{mismatch} ({_ranks(ranks[mismatch])})" for mismatch in divided)
            + '\nshape="keep" would load these keys on some ranks only. Nothing was loaded. Give the target the same '
            "shape on all ranks, or leave the keys out of the load with exclude=[...]",
            divided,
        )


def unexpected_mismatches(outcomes: Mapping[str, Outcome], metadata: Metadata) -> list[Mismatch]:
    """Return a mismatch for every key of the checkpoint that no target has."""
    return [
        Mismatch(key, "unexpected", "nothing", describe_saved(metadata.state_dict_metadata[key]))
        for key, outcome in outcomes.items()
        if outcome.status == "unexpected"
    ]


def describe_leaf(leaf: Leaf) -> str:
    """Describe a value of the target in words."""
    if leaf.is_tensor:
        return f"a tensor of shape {tuple(leaf.value.shape)}, {leaf.value.dtype}"
    return f"an object of type {type(leaf.value).__name__}"

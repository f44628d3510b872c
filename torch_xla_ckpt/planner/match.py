"""Target keys against saved keys under a policy: what to load, create, refuse and report."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.nn.parameter import is_lazy

from torch_xla_ckpt.errors import CheckpointError, Mismatch, MismatchError, MismatchKind
from torch_xla_ckpt.planner.policy import Policy, unwrapped
from torch_xla_ckpt.reports import STATUSES, Outcome
from torch_xla_ckpt.serialization import MAX_DEPTH
from torch_xla_ckpt.state import Leaf, Path, RankState, StateDictEditor, is_placeholder, misfits

Saved = TensorStorageMetadata | BytesStorageMetadata
LOADED = Outcome("loaded")  # one for all of the many keys that simply fit
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


@dataclass
class Match:
    """The outcome for every key.

    Args:
        tensors: keys of the target to load as tensors, with the saved key of each.
        objects: the same for objects.
        created: paths of saved keys to create, in the order in which to insert them.
        replaced: keys of the target that hold a placeholder, which a new tensor is to replace.
        outcomes: what becomes of every key: the target's, and those saved keys that go nowhere or are created.
        mismatches: keys that make the load fail.
        kept: keys whose shapes differ, and for which the target keeps its value.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    created: dict[str, Path] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    kept: list[Mismatch] = field(default_factory=list)


def match(
    state_dict: Mapping[Any, Any],
    leaves: Mapping[str, Leaf],
    growth: StateDictEditor,
    metadata: Metadata,
    policy: Policy,
) -> Match:
    """Compare a target with what was saved.

    Args:
        state_dict: the target.
        leaves: of it.
        growth: of it; for what is to be created.
        metadata: of the checkpoint.
        policy: what to do where they differ.

    Raises:
        CheckpointError: the policy's names and patterns do not make sense for these keys.
    """
    saved_items: Mapping[str, Saved] = metadata.state_dict_metadata
    paths = paths_of(metadata)
    _require_shapes(leaves, policy)
    if policy.only or policy.exclude:
        policy.require_use_of_patterns({*leaves, *saved_items})
    sources = _sources(leaves, saved_items, paths, policy)
    found = Match()
    others = misfits(state_dict, [*saved_items, *(policy.renamed(saved_items)[0])], policy.asks_for)
    found.mismatches += [Mismatch(key, "ranks", *both) for key, both in others.items()]
    lacking = {key for key, value in state_dict.items() if isinstance(value, RankState) and value.lacking}
    for key, leaf in leaves.items():
        if not policy.asks_for(key):
            found.outcomes[key] = Outcome("not requested")
        elif leaf.path[0] in lacking:
            found.outcomes[key] = Outcome("missing")
        elif key in sources:
            _add(found, key, leaf, sources[key], saved_items[sources[key]], policy)
        elif not _awaits(leaf, key, paths):
            found.outcomes[key] = Outcome("missing")
            if policy.missing == "error":
                found.mismatches.append(Mismatch(key, "missing", _describe_leaf(leaf), "nothing"))
    used = set(sources.values())
    extra = [key for key in saved_items if key not in used and key not in found.outcomes]
    named = _Named(state_dict, paths)
    unexpected = []
    for key in extra:
        if policy.asks_for(key) and key in named:
            unexpected.append(key)
        else:
            found.outcomes[key] = Outcome("not requested")
    create = policy.unexpected == "restore" and not named.flat
    for key in _in_order(unexpected, paths):
        if create and key in paths and not _is_quantized(saved_items[key]) and growth.has_room(paths[key]):
            found.created[key] = paths[key]
            found.outcomes[key] = Outcome("created")
            kind = found.tensors if isinstance(saved_items[key], TensorStorageMetadata) else found.objects
            kind[key] = key
        else:
            found.outcomes[key] = Outcome("unexpected")
    return found


def merged(outcomes: Iterable[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """What became of every key on all processes together: what any of them loaded is loaded."""
    first_process, *others = outcomes
    result = dict(first_process)
    for own in others:
        for key, outcome in own.items():
            known = result.get(key)
            if known is None:
                result[key] = outcome
            elif known != outcome:
                first = min(known, outcome, key=lambda one: STATUSES.index(one.status))
                result[key] = replace(first, resharded=known.resharded or outcome.resharded)
    return result


def mismatch_error(
    mismatches: Mapping[Mismatch, Sequence[int]], outcomes: Mapping[str, Outcome], processes: int = 1
) -> MismatchError:
    """The error that lists all mismatches.

    Args:
        mismatches: with the ranks where they were found, if that matters.
        outcomes: for a hint at what could be meant.
        processes: how many there are.
    """
    lines = [
        f"{mismatch} ({_ranks(ranks)})" if 0 < len(ranks) < processes else str(mismatch)
        for mismatch, ranks in mismatches.items()
    ]
    left = [key for key, outcome in outcomes.items() if outcome.status in ("created", "unexpected")]
    return MismatchError(
        f"{len(mismatches)} keys of target and checkpoint do not fit each other:\n  "
        + "\n  ".join(lines)
        + _hint(list(mismatches), left)
        + "\nNothing was loaded. "
        + _remedies({mismatch.kind for mismatch in mismatches}),
        tuple(mismatches),
    )


# What to do about each kind of mismatch, in the order in which an error lists the remedies.
_REMEDIES: dict[MismatchKind, str] = {
    "missing": 'pass missing="warn" to keep the target\'s values for keys that the checkpoint lacks, or rename= if the '
    "checkpoint has them under other names",
    "shape": 'pass shape="keep" to keep the target\'s values for keys of another shape',
    "type": "put a tensor into the target where the checkpoint has a tensor, and an object where it has an object",
    "dtype": 'pass dtype="cast" to convert values to the target\'s dtype; nothing can convert quantized values',
    "unexpected": 'pass unexpected="restore" to create keys that the target lacks, or "warn" to leave them out',
    "ranks": 'make each PerRank with resize="warn", so that ranks without saved state keep what they have',
}


def _remedies(kinds: Container[MismatchKind]) -> str:
    remedies = [remedy for kind, remedy in _REMEDIES.items() if kind in kinds]
    return "Change the target to what was saved, or do one of these:\n  " + ";\n  ".join(
        [*remedies, "leave keys out of the load with exclude=[...] (globs of whole keys)"]
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def require_same_kept_keys(outcomes: Sequence[Mapping[str, Outcome]], kept: Sequence[Sequence[Mismatch]]) -> None:
    """Check that no rank loads a key for which another rank keeps its value because the shapes differ.

    Args:
        outcomes: every rank's outcomes, by key.
        kept: every rank's keys whose shapes differ under ``shape="keep"``.

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
    """Mismatches for all keys that no target has."""
    return [
        Mismatch(key, "unexpected", "nothing", _describe(metadata.state_dict_metadata[key]))
        for key, outcome in outcomes.items()
        if outcome.status == "unexpected"
    ]


def paths_of(metadata: Metadata) -> Mapping[str, Path]:
    """Where each saved key lay in its state dict, as far as the checkpoint says so in DCP's way."""
    paths = metadata.planner_data
    return {key: path for key, path in paths.items() if _is_path(path)} if isinstance(paths, Mapping) else {}


def _is_path(path: object) -> bool:
    return (
        type(path) is tuple
        and 0 < len(path) <= MAX_DEPTH + 1
        and all(isinstance(element, str) or (type(element) is int and element >= 0) for element in path)
    )


def _require_shapes(leaves: Mapping[str, Leaf], policy: Policy) -> None:
    """Show that the tensors to load into have shapes.

    Raises:
        CheckpointError: they belong to a lazy module that has not run yet. The keys are named.
    """
    lazy = [key for key, leaf in leaves.items() if leaf.is_tensor and is_lazy(leaf.value) and policy.asks_for(key)]
    if lazy:
        more = f" and {len(lazy) - 10} more" if len(lazy) > 10 else ""
        raise CheckpointError(
            f"nothing can be loaded into {', '.join(map(repr, lazy[:10]))}{more}: parameters of a lazy module have no "
            "shape before its first forward pass. Nothing was changed. Run one forward pass first"
        )


class _Named:
    """The parts of a checkpoint that a target names.

    A target that names only "model" asks for that sub-tree; what else was saved is not requested. A flat one of
    tensors asks for everything.
    """

    def __init__(self, state_dict: Mapping[Any, Any], paths: Mapping[str, Path]):
        self._paths = paths
        self._tops = {str(key) for key in state_dict}
        self._ranks = {str(key): value for key, value in state_dict.items() if isinstance(value, RankState)}
        self.flat = bool(state_dict) and all(isinstance(value, torch.Tensor) for value in state_dict.values())

    def __contains__(self, key: str) -> bool:
        if self.flat:
            return True
        path = self._paths.get(key)
        if path:
            top = str(path[0])
            if len(path) > 1 and top in self._ranks and self._ranks[top].of_others(str(path[1])):
                return False
            return top in self._tops
        return key in self._tops or any(key.startswith(f"{top}.") for top in self._tops)


def _sources(
    leaves: Mapping[str, Leaf], saved: Mapping[str, Saved], paths: Mapping[str, Path], policy: Policy
) -> dict[str, str]:
    """For each target key that is asked for, the saved key that fills it, if there is one."""
    renamed, moved = policy.renamed(saved)
    sources: dict[str, str] = {}
    lacking = []
    for key, leaf in leaves.items():
        if not policy.asks_for(key):
            continue
        if key in renamed:
            sources[key] = renamed[key]
        elif key in saved and key not in moved:
            sources[key] = key
        elif not _awaits(leaf, key, paths):
            lacking.append(key)
    if lacking:
        used = set(sources.values()) | moved
        sources |= unwrapped(lacking, [key for key in saved if key not in used])
    return sources


def _add(found: Match, key: str, leaf: Leaf, source: str, saved: Saved, policy: Policy) -> None:
    if is_placeholder(leaf.value) and isinstance(saved, TensorStorageMetadata) and not _is_quantized(saved):
        found.tensors[key] = source
        found.replaced.add(key)
        found.outcomes[key] = Outcome("created", None if source == key else source)
        return
    kind = _compare(leaf, saved, policy)
    if kind == "shape" and policy.shape == "keep":
        assert isinstance(saved, TensorStorageMetadata)
        shapes = tuple(saved.size), tuple(leaf.value.shape)
        found.outcomes[key] = Outcome("kept", None if source == key else source, shapes=shapes)
        found.kept.append(Mismatch(key, kind, _describe_leaf(leaf), _describe(saved)))
        return
    if kind is not None:
        found.mismatches.append(Mismatch(key, kind, _describe_leaf(leaf), _describe(saved)))
        return
    other = None if source == key else source
    if isinstance(saved, TensorStorageMetadata):
        found.tensors[key] = source
        have, want = saved.properties.dtype, leaf.value.dtype
        found.outcomes[key] = (
            LOADED
            if have == want and other is None
            else Outcome("loaded", other, None if have == want else (have, want))
        )
    else:
        found.objects[key] = source
        found.outcomes[key] = Outcome("loaded", other)


def _compare(leaf: Leaf, saved: Saved, policy: Policy) -> MismatchKind | None:
    if leaf.is_tensor != isinstance(saved, TensorStorageMetadata):
        return "type"
    if isinstance(saved, TensorStorageMetadata):
        if tuple(saved.size) != tuple(leaf.value.shape):
            return "shape"
        if _is_quantized(saved) or (policy.dtype == "error" and saved.properties.dtype != leaf.value.dtype):
            return "dtype"
    return None


def _is_quantized(saved: Saved) -> bool:
    """Whether only the integers of a quantized tensor were saved, without its scale and zero point."""
    return isinstance(saved, TensorStorageMetadata) and saved.properties.dtype in _QUANTIZED


def _awaits(leaf: Leaf, key: str, paths: Mapping[str, Path]) -> bool:
    """Whether the leaf stands for a container that the checkpoint has and the program has not built yet."""
    if not is_placeholder(leaf.value):
        return False
    depth = len(leaf.path)
    start = tuple(map(str, leaf.path))
    return any(len(path) > depth and tuple(map(str, path[:depth])) == start for path in paths.values())


def _in_order(keys: Sequence[str], paths: Mapping[str, Path]) -> list[str]:
    """Keys as they were in the saved tree; positions of lists ascend even if several processes saved them."""
    wanted = set(keys)
    order = [key for key in paths if key in wanted]
    first: dict[Path, int] = {}
    for key in order:
        for depth in range(1, len(paths[key]) + 1):
            first.setdefault(paths[key][:depth], len(first))

    def place(key: str) -> list[int]:
        path = paths[key]
        return [e if isinstance(e, int) else first[path[: n + 1]] for n, e in enumerate(path)]

    return [*sorted(order, key=place), *(key for key in keys if key not in paths)]


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
        lacking = ", quantized and saved without its scale and zero point" if _is_quantized(saved) else ""
        return f"a tensor of shape {tuple(saved.size)}, {saved.properties.dtype}{lacking}"
    return "an object"

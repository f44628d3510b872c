"""Matches keys of the target with keys of the checkpoint: what a load reads, creates, keeps and refuses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.nn.parameter import is_lazy

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError, Mismatch, MismatchKind
from torch_xla_ckpt.planner.mismatches import describe_leaf
from torch_xla_ckpt.planner.pairing import pair_prefixed_keys, pair_tied_keys
from torch_xla_ckpt.planner.policy import Policy, pair_wrapped_keys
from torch_xla_ckpt.planner.saved import Saved, describe_saved, in_saved_order, is_quantized, paths_of
from torch_xla_ckpt.reports import STATUSES, Outcome
from torch_xla_ckpt.state import Leaf, Path, RankState, StateDictEditor, is_placeholder, misfits
from torch_xla_ckpt.storage import written_by

logger = logging.getLogger(__name__)

LOADED = Outcome("loaded")  # one object for all of the many keys that are simply loaded
_SHOWN = 10  # keys that an error names


@dataclass
class Match:
    """The outcome of every key on this rank.

    Args:
        tensors: for each target key to load as a tensor, the saved key.
        objects: for each target key to load as an object, the saved key.
        created: paths of the saved keys to create, in the order of insertion.
        replaced: target keys that hold a placeholder, which a new tensor will replace.
        outcomes: the outcome of every key of the target, and of every saved key that fills no key of the target.
        mismatches: keys that make the load fail.
        kept: keys that have another shape in the checkpoint and keep the target's values.
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
    editor: StateDictEditor,
    metadata: Metadata,
    policy: Policy,
) -> Match:
    """Compare a target with a checkpoint.

    Args:
        state_dict: the target.
        leaves: the target's values by key.
        editor: tells where the target has room for new values.
        metadata: the checkpoint's metadata.
        policy: what to do where the two differ.

    Raises:
        CheckpointError: names or patterns of the policy match no key, or a target tensor has no shape yet.
    """
    saved: Mapping[str, Saved] = metadata.state_dict_metadata
    paths = paths_of(metadata)
    _require_initialized(leaves, policy)
    if policy.only or policy.exclude:
        policy.require_use_of_patterns({*leaves, *saved})
    is_flat = isinstance(metadata, _dcp.FlatMetadata)
    sources = _sources(leaves, saved, paths, policy, is_flat=is_flat)
    lacking = [key for key in leaves if key not in sources and policy.asks_for(key)]
    twins = pair_tied_keys(lacking, leaves, sources)
    found = Match()
    _match_ranks(found, state_dict, saved, policy)
    _match_target(found, state_dict, leaves, saved, paths, sources, twins, policy)
    place = _empty_place(state_dict) if is_flat and not sources else None
    if place is None:
        _match_empty(found, state_dict, leaves, metadata, policy)
        _match_unused(found, state_dict, editor, saved, paths, sources, policy)
    else:
        _create_all(found, place, saved, policy)
    return found


def _match_ranks(found: Match, state_dict: Mapping[Any, Any], saved: Mapping[str, Saved], policy: Policy) -> None:
    """Refuse state of single ranks that another number of ranks has saved."""
    names = [*saved, *(policy.renamed(saved)[0])]
    for key, (target, checkpoint) in misfits(state_dict, names, policy.asks_for).items():
        found.mismatches.append(Mismatch(key, "ranks", target, checkpoint))


def _match_target(
    found: Match,
    state_dict: Mapping[Any, Any],
    leaves: Mapping[str, Leaf],
    saved: Mapping[str, Saved],
    paths: Mapping[str, Path],
    sources: Mapping[str, str],
    twins: Mapping[str, tuple[str, str]],
    policy: Policy,
) -> None:
    """Decide for every key of the target."""
    lacking = {key for key, value in state_dict.items() if isinstance(value, RankState) and value.lacking}
    for key, leaf in leaves.items():
        if not policy.asks_for(key):
            found.outcomes[key] = Outcome("not requested")
        elif leaf.path[0] in lacking:
            found.outcomes[key] = Outcome("missing")
        elif key in sources:
            _match_pair(found, key, leaf, sources[key], saved[sources[key]], policy)
        elif key in twins:
            continue  # decided when its twin is
        elif not _stands_for_container(leaf, paths):
            found.outcomes[key] = Outcome("missing")
            if policy.missing == "error":
                found.mismatches.append(Mismatch(key, "missing", describe_leaf(leaf), "nothing"))
    for key, (twin, source) in twins.items():  # the load of the twin fills the tensor that both name
        if twin in found.outcomes:
            found.outcomes[key] = replace(found.outcomes[twin], renamed=source)


def _match_empty(
    found: Match,
    state_dict: Mapping[Any, Any],
    leaves: Mapping[str, Leaf],
    metadata: Metadata,
    policy: Policy,
) -> None:
    """Miss each empty dict in the target, such as ``{"model": {}}``, of whose name the checkpoint has nothing.

    Stock DCP saves no empty dicts. So in a checkpoint of another writer, the name of one may rightly be absent.
    """
    filled = {str(leaf.path[0]) for leaf in leaves.values()}
    names = {*metadata.state_dict_metadata, *policy.renamed(metadata.state_dict_metadata)[0]}
    for key in map(str, (key for key, value in state_dict.items() if _is_empty(value))):
        is_saved = any(name == key or name.startswith(f"{key}.") for name in names)
        if key in filled or is_saved or not policy.asks_for(key):
            continue
        if written_by(metadata) is None:
            logger.warning("the checkpoint has nothing under %r, so nothing was loaded there", key)
            continue
        found.outcomes[key] = Outcome("missing")
        if policy.missing == "error":
            found.mismatches.append(Mismatch(key, "missing", "an empty dict", "nothing"))


def _is_empty(value: Any) -> bool:
    """Whether a value is a mapping without any values in it, however deep."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, RankState) or not isinstance(one, Mapping):
            return False
        waiting += one.values()
    return True


def _match_unused(
    found: Match,
    state_dict: Mapping[Any, Any],
    editor: StateDictEditor,
    saved: Mapping[str, Saved],
    paths: Mapping[str, Path],
    sources: Mapping[str, str],
    policy: Policy,
) -> None:
    """Decide for every saved key that fills no key of the target."""
    used = set(sources.values())
    requested = _RequestedParts(state_dict, paths)
    unexpected = []
    for key in saved:
        if key in used or key in found.outcomes:
            continue
        if policy.asks_for(key) and key in requested:
            unexpected.append(key)
        else:
            found.outcomes[key] = Outcome("not requested")
    create = policy.unexpected == "restore" and not requested.all
    for key in in_saved_order(unexpected, paths):
        if create and key in paths and not is_quantized(saved[key]) and editor.has_room(paths[key]):
            found.created[key] = paths[key]
            found.outcomes[key] = Outcome("created")
            kind = found.tensors if isinstance(saved[key], TensorStorageMetadata) else found.objects
            kind[key] = key
        else:
            found.outcomes[key] = Outcome("unexpected")


def _empty_place(state_dict: Mapping[Any, Any]) -> Any:
    """Return the key of the only empty dict in a target; None if there is none or several."""
    empty = [key for key, value in state_dict.items() if type(value) is dict and not value]
    return empty[0] if len(empty) == 1 else None


def _create_all(found: Match, place: Any, saved: Mapping[str, Saved], policy: Policy) -> None:
    """Create all values of a model's file in the empty dict under ``place``."""
    for source in saved:
        key = f"{place}.{source}"
        if not policy.asks_for(key):
            found.outcomes[source] = Outcome("not requested")
        elif policy.unexpected == "restore":
            found.created[key] = (str(place), source)
            kind = found.tensors if isinstance(saved[source], TensorStorageMetadata) else found.objects
            kind[key] = source
            found.outcomes[key] = Outcome("created", source)
        else:
            found.outcomes[source] = Outcome("unexpected")


def merged(outcomes: Iterable[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """Merge the outcomes of all ranks. A key that any rank loaded is "loaded".

    Args:
        outcomes: each rank's outcome of every key.
    """
    first_rank, *others = outcomes
    result = dict(first_rank)
    for own in others:
        for key, outcome in own.items():
            known = result.get(key)
            if known is None:
                result[key] = outcome
            elif known != outcome:
                first = min(known, outcome, key=lambda one: STATUSES.index(one.status))
                result[key] = replace(first, resharded=known.resharded or outcome.resharded)
    return result


def _require_initialized(leaves: Mapping[str, Leaf], policy: Policy) -> None:
    """Check that no tensor to load into belongs to a lazy module that has not run yet.

    Raises:
        CheckpointError: naming the keys of such tensors.
    """
    lazy = [key for key, leaf in leaves.items() if leaf.is_tensor and is_lazy(leaf.value) and policy.asks_for(key)]
    if lazy:
        more = f" and {len(lazy) - _SHOWN} more" if len(lazy) > _SHOWN else ""
        raise CheckpointError(
            f"nothing can be loaded into {', '.join(map(repr, lazy[:_SHOWN]))}{more}: parameters of a lazy module have "
            "no shape before its first forward pass. Nothing was changed. Run one forward pass first"
        )


class _RequestedParts:
    """The parts of a checkpoint that a target requests.

    A target that names only "model" requests the keys under "model". A flat target of tensors requests every key.

    Attributes:
        all: whether every key is requested.
    """

    def __init__(self, state_dict: Mapping[Any, Any], paths: Mapping[str, Path]):
        self._paths = paths
        self._tops = {str(key) for key in state_dict}
        self._ranks = {str(key): value for key, value in state_dict.items() if isinstance(value, RankState)}
        self.all = bool(state_dict) and all(isinstance(value, torch.Tensor) for value in state_dict.values())

    def __contains__(self, key: str) -> bool:
        if self.all:
            return True
        path = self._paths.get(key)
        if path:
            top = str(path[0])
            if len(path) > 1 and top in self._ranks and self._ranks[top].of_others(str(path[1])):
                return False
            return top in self._tops
        return key in self._tops or any(key.startswith(f"{top}.") for top in self._tops)


def _sources(
    leaves: Mapping[str, Leaf], saved: Mapping[str, Saved], paths: Mapping[str, Path], policy: Policy, *, is_flat: bool
) -> dict[str, str]:
    """Return the saved key that fills each requested target key; keys without one are left out.

    Args:
        leaves: the target's values by key.
        saved: the checkpoint's values by key.
        paths: path of each saved key.
        policy: what to do where the two differ.
        is_flat: whether the checkpoint is the file of one model.
    """
    renamed, moved = policy.renamed(saved)
    sources: dict[str, str] = {}
    unmatched = []
    for key, leaf in leaves.items():
        if not policy.asks_for(key):
            continue
        if key in renamed:
            sources[key] = renamed[key]
        elif key in saved and key not in moved:
            sources[key] = key
        elif not _stands_for_container(leaf, paths):
            unmatched.append(key)
    if unmatched:
        used = set(sources.values()) | moved
        sources |= pair_wrapped_keys(unmatched, [key for key in saved if key not in used])
    if unmatched and not sources and is_flat:
        sources = pair_prefixed_keys(unmatched, [key for key in saved if key not in moved])
    return sources


def _match_pair(found: Match, key: str, leaf: Leaf, source: str, saved: Saved, policy: Policy) -> None:
    """Decide for a target key and the saved key that fills it."""
    old_name = None if source == key else source
    if is_placeholder(leaf.value) and isinstance(saved, TensorStorageMetadata) and not is_quantized(saved):
        found.tensors[key] = source
        found.replaced.add(key)
        found.outcomes[key] = Outcome("created", old_name)
        return
    kind = _compare(leaf, saved, policy)
    if kind is not None:
        mismatch = Mismatch(key, kind, describe_leaf(leaf), describe_saved(saved))
        if kind == "shape" and policy.shape == "keep":
            assert isinstance(saved, TensorStorageMetadata)
            shapes = tuple(saved.size), tuple(leaf.value.shape)
            found.kept.append(mismatch)
            found.outcomes[key] = Outcome("kept", old_name, shapes=shapes)
        else:
            found.mismatches.append(mismatch)
    elif isinstance(saved, TensorStorageMetadata):
        found.tensors[key] = source
        dtypes = saved.properties.dtype, leaf.value.dtype
        cast = None if dtypes[0] == dtypes[1] else dtypes
        found.outcomes[key] = Outcome("loaded", old_name, cast) if cast or old_name is not None else LOADED
    else:
        found.objects[key] = source
        found.outcomes[key] = Outcome("loaded", old_name)


def _compare(leaf: Leaf, saved: Saved, policy: Policy) -> MismatchKind | None:
    """Return how a target value and a saved value do not fit; None if the saved value can be loaded."""
    if leaf.is_tensor != isinstance(saved, TensorStorageMetadata):
        return "type"
    if isinstance(saved, TensorStorageMetadata):
        if tuple(saved.size) != tuple(leaf.value.shape):
            return "shape"
        if is_quantized(saved) or (policy.dtype == "error" and saved.properties.dtype != leaf.value.dtype):
            return "dtype"
    return None


def _stands_for_container(leaf: Leaf, paths: Mapping[str, Path]) -> bool:
    """Whether the leaf is a placeholder for a container that the checkpoint has."""
    if not is_placeholder(leaf.value):
        return False
    depth = len(leaf.path)
    start = tuple(map(str, leaf.path))
    return any(len(path) > depth and tuple(map(str, path[:depth])) == start for path in paths.values())

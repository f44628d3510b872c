"""Modules as targets of a load: which of their tensors the checkpoint fills, and what they must be handed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.device import alias_of
from torch_xla_ckpt.planner import Policy, match, mismatch_error, unexpected_mismatches
from torch_xla_ckpt.restoring.materialize import held_tensors
from torch_xla_ckpt.state import Closed, StateDictEditor, flatten


@dataclass
class Unfilled:
    """Parameters and persistent buffers of modules whose values a load will not replace, by ``id``.

    Args:
        tensors: all of them.
        other_shape: those that have another shape in the checkpoint.
    """

    tensors: set[int] = field(default_factory=set)
    other_shape: set[int] = field(default_factory=set)


def target_of(models: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Return a target for the state of modules, by their keys. Modules take no keys that they lack.

    Args:
        models: modules by key; "" for a checkpoint that is nothing but one model's state.
    """
    target: dict[str, Any] = {}
    for key, model in models.items():
        state = model.state_dict()
        target |= {key: Closed(state)} if key else state
    return target


def require_fit(
    metadata: Metadata, models: Mapping[str, torch.nn.Module], others: Mapping[str, Any], policy: Policy
) -> Unfilled:
    """Check, before a model is changed, that its tensors can be loaded.

    Args:
        metadata: the checkpoint's metadata.
        models: modules by key.
        others: the rest of the target, by key.
        policy: what to do where target and checkpoint differ.

    Returns:
        The modules' tensors that will not be loaded.

    Raises:
        MismatchError: the policy does not allow a difference.
    """
    # Objects are asked for their state only once, by the load itself; an empty dict has their place here.
    rest = {key: value if isinstance(value, (dict, torch.Tensor)) else {} for key, value in others.items()}
    target = {**rest, **target_of(models)}
    found = match(target, flatten(target), StateDictEditor(target), metadata, policy)
    mismatches = dict.fromkeys(found.mismatches, ())
    if policy.unexpected == "error":
        starts = tuple(f"{key}." for key in models if key)
        extra = unexpected_mismatches(found.outcomes, metadata)
        mismatches |= dict.fromkeys((one for one in extra if one.key.startswith(starts)), ())
    if mismatches:
        raise mismatch_error(mismatches, found.outcomes)
    unfilled = Unfilled()
    for key, model in models.items():
        outcomes = [
            (id(one.tensor), outcome.status)
            for one in held_tensors(key, model)
            if (outcome := found.outcomes.get(one.key)) is not None
        ]
        filled = {number for number, status in outcomes if status in ("loaded", "created")}
        unfilled.tensors |= {number for number, _ in outcomes} - filled
        unfilled.other_shape |= {number for number, status in outcomes if status == "kept"} - filled
    return unfilled


def set_what_is_made_anew(model: torch.nn.Module, loaded: Mapping[str, Any]) -> None:
    """Hand a module the loaded values that its tensors do not share: extra state, or packed quantized weights."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    own = {alias_of(tensor) for tensor in tensors.values()}
    rest = OrderedDict(
        (key, value)
        for key, value in loaded.items()
        if key not in tensors and not (isinstance(value, torch.Tensor) and alias_of(value) in own)
    )
    if rest:
        # Modules read from it in which version their state was written.
        rest._metadata = getattr(model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
        model.load_state_dict(rest, strict=False)

"""Optimizers as targets of a load: a place for all state that the checkpoint has for each parameter."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_xla_ckpt import api
from torch_xla_ckpt.device import Placement, make, require_place
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.planner import Place, Policy, paths_of
from torch_xla_ckpt.restoring.optimizer_state import SavedState, fresh_state, refusal, require_own_state
from torch_xla_ckpt.restoring.priming import sharded_state
from torch_xla_ckpt.state import Path, StateDictEditor

logger = logging.getLogger(__name__)


def saved_groups(key: str, options: Mapping[str, Any]) -> list[Any]:
    """Read the ``param_groups`` of an optimizer.

    Args:
        key: the optimizer's key in the checkpoint.
        options: options of ``load``, without those of its policy.
    """
    found: dict[str, Any] = {key: {"param_groups": []}}
    api.load(found, only=f"{glob.escape(key)}.param_groups*", **options)
    return list(found[key]["param_groups"])


@dataclass(frozen=True)
class _Slot:
    """A parameter of an optimizer.

    Args:
        param: the parameter.
        group: the options of its group, as they are after the restore.
        number: the position of its group.
    """

    param: torch.Tensor
    group: Mapping[str, Any]
    number: int

    def placement(self, name: str) -> Placement | None:
        """Return where a tensor of the parameter's state goes by default."""
        if name == "step" and not (self.group.get("capturable") or self.group.get("fused")):
            return None  # torch keeps it in host memory
        return self.param


@dataclass(frozen=True)
class _Part:
    """A part of a parameter's saved state: a tensor, or an object without shape and dtype.

    Args:
        key: the part's key in the checkpoint.
        path: the key's elements.
        slot: the parameter.
        shape, dtype: the saved tensor's; None for an object.
        place: where the caller's ``placement`` wants the tensor; None for the default.
    """

    key: str
    path: Path
    slot: _Slot
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    place: Placement | None = None

    @property
    def name(self) -> str:
        """The name of the part in the state of its parameter: "exp_avg"."""
        return str(self.path[3])

    def value(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return a tensor to load into, the optimizer's own or a new one; None for an object."""
        if self.shape is None or self.dtype is None:
            return None
        there = self.existing(optimizer)
        if there is not None:
            return there
        return make(
            self.shape, self.dtype, self.slot.placement(str(self.path[-1])) if self.place is None else self.place
        )

    def existing(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return the optimizer's own tensor if data can be loaded into it and it lies where its parameter does."""
        here: Any = optimizer.state.get(self.slot.param, {})
        for element in self.path[3:]:
            if not isinstance(here, Mapping) or element not in here:
                return None
            here = here[element]
        if not isinstance(here, torch.Tensor) or here.shape != self.shape or here.device.type == "meta":
            return None
        return here if not here.ndim or here.device.type == self.slot.param.device.type else None


class OptimizerRestore:
    """The restore of one optimizer. Making one changes nothing.

    Args:
        key: the optimizer's key in the checkpoint.
        optimizer: the optimizer.
        groups: the saved ``param_groups``.
        metadata: the checkpoint's metadata.
        placement: where the caller wants state tensors; see ``restore``.
        policy: what to do where the optimizer and the checkpoint differ.
        other_shape: ``id`` of parameters that keep their values, because the checkpoint has another shape.

    Attributes:
        kept_keys: keys of saved state that is not loaded, because its parameter has another shape.

    Raises:
        CheckpointError: groups or state are not those of this optimizer.
    """

    def __init__(
        self,
        key: str,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Any],
        metadata: Metadata,
        placement: Place | None,
        policy: Policy,
        other_shape: set[int],
    ):
        self._key = key
        self._optimizer = optimizer
        self._policy = policy
        _require_groups(key, optimizer, groups)
        self._groups = self._with_own_options(groups, metadata)
        self._slots = _slots(optimizer, self._groups)
        parts = [part for part in _parts(metadata, key, self._slots, placement) if policy.asks_for(part.key)]
        self._fresh = {str(name) for name, slot in self._slots.items() if id(slot.param) in other_shape}
        saved = [part for part in parts if str(part.path[2]) not in self._fresh]
        differing = require_own_state(key, optimizer, self._groups, list(self._saved_state(saved)))
        if differing and policy.shape == "error":
            raise refusal(key, next(iter(differing.values())))
        self._fresh |= differing.keys()
        self._parts = [part for part in saved if str(part.path[2]) not in self._fresh]
        self.kept_keys = tuple(part.key for part in parts if str(part.path[2]) in self._fresh)

    def target(self) -> tuple[dict[str, Any], set[str]]:
        """Return a state dict with a place for all state to load, and the keys that are new to the optimizer."""
        with_state = {str(part.path[2]) for part in self._parts}
        state: dict[Any, Any] = {name: {} for name in self._slots if str(name) in with_state}
        target = {"state": state, "param_groups": self._groups}
        created = {part.key for part in self._parts if part.existing(self._optimizer) is None}
        StateDictEditor(target).insert((part.path[1:], part.value(self._optimizer)) for part in self._parts)
        return target, created

    def finish(self, loaded: Mapping[str, Any]) -> None:
        """Hand the optimizer its loaded state, with its own state for whatever was not loaded.

        Args:
            loaded: the result of ``target``, after the load.
        """
        state = dict(loaded["state"])
        for name, slot in self._slots.items():
            own = self._own_state(slot) if str(name) in self._fresh else self._own_unasked(name, slot)
            if own:
                state[name] = {**own, **state.get(name, {})}
        if self.kept_keys:
            logger.warning(
                "the optimizer state of parameters with another shape in the checkpoint is not loaded: %s",
                ", ".join(self.kept_keys),
            )
        whole = {**loaded, "state": state}
        self._optimizer.load_state_dict(sharded_state(self._optimizer, whole))

    def _with_own_options(self, groups: Sequence[Any], metadata: Metadata) -> list[dict[str, Any]]:
        """Return the saved groups, with the optimizer's own options where the policy leaves out the saved ones."""
        result = []
        for number, (saved, own) in enumerate(zip(groups, self._optimizer.param_groups)):
            key = f"{self._key}.param_groups.{number}"
            is_one_object = key in metadata.state_dict_metadata
            kept = {
                name
                for name in saved
                if name != "params"
                and name in own
                and not self._policy.asks_for(key if is_one_object else f"{key}.{name}")
            }
            result.append({name: own[name] if name in kept else value for name, value in saved.items()})
        return result

    def _own_state(self, slot: _Slot) -> dict[str, Any]:
        """Return the optimizer's own state for a parameter; as when it was built if the state is on the meta device."""
        own = dict(self._optimizer.state.get(slot.param, {}))
        if any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in own.values()):
            return fresh_state(self._optimizer, slot.group, slot.param)
        return own

    def _own_unasked(self, name: Any, slot: _Slot) -> dict[str, Any]:
        """Return the part of the optimizer's own state that ``only`` and ``exclude`` leave alone."""
        start = f"{self._key}.state.{name}"
        own = self._optimizer.state.get(slot.param, {})
        return {part: value for part, value in own.items() if not self._policy.asks_for(f"{start}.{part}")}

    def _saved_state(self, parts: Sequence[_Part]) -> Iterator[SavedState]:
        """Yield what each parameter will have, except those that keep their own state."""
        shapes: dict[int, dict[str, torch.Size | None]] = {id(slot): {} for slot in self._slots.values()}
        for part in parts:
            shapes[id(part.slot)][part.name] = part.shape if len(part.path) == 4 else None
        for name, slot in self._slots.items():
            if str(name) not in self._fresh:
                own = {part: getattr(value, "shape", None) for part, value in self._own_unasked(name, slot).items()}
                yield SavedState(str(name), slot.param, slot.number, {**own, **shapes[id(slot)]})


def _require_groups(key: str, optimizer: torch.optim.Optimizer, groups: Sequence[Any]) -> None:
    """Check that an optimizer's groups have as many parameters as the saved groups.

    Raises:
        CheckpointError: they have not.
    """
    saved = [len(group["params"]) for group in groups]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise CheckpointError(
            f"the optimizer's parameter groups do not fit {key!r}: the checkpoint has groups of {saved} parameters, "
            f"the optimizer of {own}. Nothing was changed. Give the optimizer the groups it had when it was saved, or "
            "leave the optimizer out and begin with fresh state"
        )


def _slots(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> dict[Any, _Slot]:
    """Return the parameter for each number, or name, under which the checkpoint has the state of a parameter."""
    return {
        name: _Slot(param, {**own, **{k: v for k, v in saved.items() if k != "params"}}, number)
        for number, (saved, own) in enumerate(zip(groups, optimizer.param_groups))
        for name, param in zip(saved["params"], own["params"])
    }


def _parts(metadata: Metadata, key: str, slots: Mapping[Any, _Slot], placement: Place | None) -> list[_Part]:
    """Return all parts of an optimizer's state that the checkpoint has.

    Raises:
        CheckpointError: a part belongs to no parameter, or cannot be where ``placement`` says.
    """
    by_text = {str(name): slot for name, slot in slots.items()}
    parts: list[_Part] = []
    for full_key, path in paths_of(metadata).items():
        if len(path) <= 3 or str(path[0]) != key or path[1] != "state":
            continue
        slot = by_text.get(str(path[2]))
        if slot is None:
            raise CheckpointError(
                f"{full_key!r} is the state of a parameter that none of the saved groups has. Nothing was changed. "
                "Save the optimizer's state_dict() as it is"
            )
        part = _Part(full_key, path, slot)
        saved = metadata.state_dict_metadata[full_key]
        if isinstance(saved, TensorStorageMetadata):
            shape, dtype = torch.Size(saved.size), saved.properties.dtype
            place = None if placement is None else _required_place(placement, full_key, shape, dtype)
            part = replace(part, shape=shape, dtype=dtype, place=place)
        parts.append(part)
    return parts


def _required_place(placement: Place, key: str, shape: torch.Size, dtype: torch.dtype) -> Placement | None:
    place = placement(key, shape, dtype)
    try:
        require_place(place, shape)
    except ValueError as error:
        raise CheckpointError(
            f"cannot create {key!r}, of shape {tuple(shape)}, where placement= says: {error}. Nothing was changed"
        ) from error
    return place

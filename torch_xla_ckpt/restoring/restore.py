"""Restoring models that have no data yet and optimizers that never took a step."""

from __future__ import annotations

import functools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_xla_ckpt import api
from torch_xla_ckpt.device import Placement, access_of, alias_of, make, require_place
from torch_xla_ckpt.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    MismatchError,
    ReplacedCheckpointError,
    UnsafeObjectError,
)
from torch_xla_ckpt.planner import (
    Dtype,
    Missing,
    Place,
    Policy,
    Rename,
    Unexpected,
    copy_into,
    mark_primed,
    match,
    mismatch_error,
    paths_of,
    unexpected_mismatches,
)
from torch_xla_ckpt.reports import LoadReport
from torch_xla_ckpt.restoring.materialize import Plan, Sharding
from torch_xla_ckpt.restoring.optimizer_state import SavedState, require_own_state
from torch_xla_ckpt.serialization import AllowedType
from torch_xla_ckpt.state import Closed, Path, StateDictEditor, flatten
from torch_xla_ckpt.storage import ShardReader

logger = logging.getLogger(__name__)

_OPTIMIZER_KEYS = ("optim", "optimizer")


def restore(
    path: str | os.PathLike[str] | None = None,
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    state: dict[str, Any] | None = None,
    sharding: Sharding | None = None,
    mesh: Any = None,
    placement: Place | None = None,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    missing: Missing = "error",
    unexpected: Unexpected = "restore",
    dtype: Dtype = "cast",
    rename: Rename | None = None,
    allow_types: Sequence[AllowedType] = (),
    trust_pickle: bool = False,
    verify: bool = True,
    progress: bool = False,
    storage_reader: ShardReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadReport:
    """Load a model and its optimizer, in whatever state of being built they are.

    Parameters and buffers that have no data yet are made on their devices, already sharded, and filled from the
    checkpoint. The optimizer's state is made like the parameters it belongs to and handed to ``load_state_dict``; no
    step runs.

    Keys, shapes, dtypes, groups and specs are compared first: if they do not fit, nothing has changed. Two things show
    only later: bytes that are damaged, and code of the model or the optimizer that raises when it is handed its values.
    Then tensors that were already loaded in place hold new values, as the error says. The optimizer's groups and
    hyperparameters are the old ones, and parameters that were given a place are where they were before. Restore again,
    from another checkpoint if this one is damaged.

    Args:
        path: folder or fsspec URL; not needed when a storage reader that knows it is given.
        model: its parameters may be on the meta device, in host memory or on devices. They stay the same objects, so
            an optimizer may hold them already.
        optimizer: of the model's parameters. The checkpoint has its ``state_dict()``.
        state: whatever else is to be loaded, by top-level key, as for ``load``: nested dicts, ``Stateful``s.
        sharding: partition specs by patterns of parameter and buffer names (globs; the first that fits counts), where
            names that none fits are replicated; or a function that marks the shardings of the module it is given, once
            its tensors are on the XLA device. A tensor that is on devices already keeps what it has. Default: tensors
            stay where they are, and those without data are made unsharded on the XLA device, or in host memory where
            there is no torch_xla.
        mesh: that the specs are for. A pattern may also have a pair of its own, (mesh, spec).
        placement: where the optimizer's state goes: a function of key, shape and dtype, as for ``load``. Where it
            returns None: like the parameter if that has the same shape, else replicated; a step count in host memory,
            where torch keeps it.
        model_key, optimizer_key: where they lie in the checkpoint. By default "model", or the whole of a checkpoint
            that is nothing but a model; and the part that has "param_groups".
        missing, unexpected, dtype, rename, allow_types, trust_pickle, verify, progress, storage_reader, process_group,
            no_dist: see ``load``. Values to keep for what is missing must be there: parameters on the meta device have
            none.

    Returns:
        What became of every key, what was read, and how long it took.

    Raises:
        MismatchError: target and checkpoint do not fit each other.
        CheckpointError: the optimizer's groups or the specs do not fit, or tensors cannot be made; and as for ``load``.
    """
    if storage_reader is None:
        storage_reader = ShardReader(api.given(path), verify=verify, progress=progress)
    elif path is not None:
        storage_reader.reset(path)
    policy = Policy(missing, unexpected, dtype, rename)
    wanted = _Wanted(model, optimizer, state, sharding, mesh, placement, model_key, optimizer_key, policy)
    options: dict[str, Any] = {
        "allow_types": allow_types,
        "trust_pickle": trust_pickle,
        "storage_reader": storage_reader,
        "process_group": process_group,
        "no_dist": no_dist,
    }
    for restarts in range(api.RESTARTS + 1):
        try:
            return replace(wanted.restored(storage_reader, options), restarts=restarts)
        except ReplacedCheckpointError as error:  # on all processes
            if restarts == api.RESTARTS:
                raise
            logger.warning("%s", error)
    raise AssertionError


@dataclass(frozen=True)
class _Wanted:
    """What a call of ``restore`` is given; see there."""

    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer | None
    state: dict[str, Any] | None
    sharding: Sharding | None
    mesh: Any
    placement: Place | None
    model_key: str | None
    optimizer_key: str | None
    policy: Policy

    def restored(self, reader: ShardReader, options: Mapping[str, Any]) -> LoadReport:
        """Restore from the checkpoint that is there now.

        Args:
            reader: reads it.
            options: for ``load``.

        Raises:
            ReplacedCheckpointError: another save replaced the checkpoint meanwhile. Tensors that were loaded in place
                by then hold new values; all else is as it was.
        """
        together = functools.partial(
            api.agreed, options["process_group"], options["no_dist"], f"restoring from {reader.location}"
        )
        with together():
            metadata = reader.read_metadata()
            keys = _Keys(metadata, self.model, self.model_key, self.optimizer, self.optimizer_key, self.state or {})
        with reader.pinned():
            return self._restored(metadata, keys, options, together)

    def _restored(
        self,
        metadata: Metadata,
        keys: _Keys,
        options: Mapping[str, Any],
        together: Callable[[], AbstractContextManager[None]],
    ) -> LoadReport:
        model, optimizer, state = self.model, self.optimizer, self.state
        groups: list[Any] = [] if optimizer is None else _saved_groups(keys.optimizer, options)
        plan: Plan | None = None
        with together():
            slots: dict[Any, _Slot] = {}
            parts: list[_Part] = []
            if optimizer is not None:
                slots = _slots(optimizer, groups, keys.optimizer)
                parts = _parts(metadata, keys.optimizer, slots, self.placement)
                require_own_state(keys.optimizer, optimizer, groups, _saved_state(slots, parts))
            if model is not None:
                plan = Plan(model, self.sharding, self.mesh)
                kept = _require_fit(metadata, keys, model, self.policy)
        with _put_back_if_it_fails(plan, optimizer):
            if plan is not None:
                with together():
                    plan.run(kept)
            target: dict[str, Any] = dict(state or {})
            if model is not None:
                target |= keys.nested(model)
            created: set[str] = set()
            if optimizer is not None:
                target[keys.optimizer], created = _optimizer_target(optimizer, slots, groups, parts)
            with _saying_what_is_loaded():
                report = api.load(
                    target,
                    missing=self.policy.missing,
                    unexpected=self.policy.unexpected,
                    dtype=self.policy.dtype,
                    rename=self.policy.rename,
                    placement=self.placement,
                    **options,
                )
                with together():
                    if model is not None:
                        _set_what_is_made_anew(model, keys.taken(target))
                    if optimizer is not None:
                        optimizer.load_state_dict(target[keys.optimizer])
        if state is not None:
            state.update({key: target[key] for key in state})
        outcomes = {
            key: replace(outcome, status="created") if key in created and outcome.status == "loaded" else outcome
            for key, outcome in report.outcomes.items()
        }
        return replace(report, outcomes=outcomes)


@contextmanager
def _put_back_if_it_fails(plan: Plan | None, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Undo, if the block fails, what was done to a module's tensors and to an optimizer's groups and state.

    Tensors that were on devices already, and have been loaded by then, keep what was loaded.
    """
    before = None if optimizer is None else (optimizer.param_groups, optimizer.state)
    try:
        yield
    except BaseException:
        if plan is not None:
            plan.undo()
        if optimizer is not None and before is not None:
            optimizer.param_groups, optimizer.state = before
        raise
    if plan is not None:
        plan.forget()


@contextmanager
def _saying_what_is_loaded() -> Iterator[None]:
    """Add to an error of the block that tensors may have been loaded, unless it is one that comes before."""
    try:
        yield
    except (MismatchError, IncompleteCheckpointError, UnsafeObjectError, ReplacedCheckpointError):
        raise
    except CheckpointError as error:
        error.args = (f"{error}. {_PARTLY}", *error.args[1:])
        raise
    except Exception as error:  # of the model's or the optimizer's own code
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(_PARTLY)
        raise


_PARTLY = (
    "Tensors that had been loaded in place by then hold new values; the optimizer's groups and hyperparameters are the "
    "old ones. Restore again, from another checkpoint if this one is damaged"
)


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return ``optimizer``, ready to load a checkpoint: for programs written for torch_xla's planners.

    There, a dummy step had to create the optimizer's state. Here loading creates what is absent, so no step is run.
    What this does is to see to it that ``optimizer.load_state_dict`` gives state that lies in host memory the sharding
    of its parameter. ``restore`` needs neither.
    """
    optimizer.register_load_state_dict_pre_hook(_sharded_state)
    optimizer.register_state_dict_post_hook(mark_primed)
    return optimizer


@dataclass(frozen=True)
class _Slot:
    """A parameter of an optimizer, with the options and the position of its group."""

    param: torch.Tensor
    group: Mapping[str, Any]
    number: int

    def placement(self, name: str, shape: torch.Size) -> Placement | None:
        if name == "step" and not (self.group.get("capturable") or self.group.get("fused")):
            return None  # torch keeps it in host memory
        return self.param


class _Keys:
    """Where model and optimizer lie in a checkpoint."""

    def __init__(
        self,
        metadata: Metadata,
        model: torch.nn.Module | None,
        model_key: str | None,
        optimizer: torch.optim.Optimizer | None,
        optimizer_key: str | None,
        state: Mapping[str, Any],
    ):
        paths = paths_of(metadata)
        self._tops = list(dict.fromkeys(str(paths.get(key, (key,))[0]) for key in metadata.state_dict_metadata))
        self.model = self._model_key(metadata, model, model_key) if model is not None else ""
        self.optimizer = self._optimizer_key(paths, optimizer_key) if optimizer is not None else ""
        taken = {key for key in (self.model, self.optimizer) if key} & set(state)
        if taken:
            raise CheckpointError(f"state= has {sorted(taken)}, where the checkpoint has the model or the optimizer")

    def _model_key(self, metadata: Metadata, model: torch.nn.Module, given: str | None) -> str:
        if given is not None:
            return self._known(given, "model_key")
        if "model" in self._tops:
            return "model"
        if any(key in metadata.state_dict_metadata for key in model.state_dict()):
            return ""
        raise CheckpointError(f"where does the model lie? The checkpoint has {self._shown()}; say model_key=")

    def _optimizer_key(self, paths: Mapping[str, Path], given: str | None) -> str:
        if given is not None:
            return self._known(given, "optimizer_key")
        found = dict.fromkeys(str(p[0]) for p in paths.values() if len(p) > 1 and p[1] == "param_groups")
        likely = list(found) if len(found) == 1 else [key for key in _OPTIMIZER_KEYS if key in found]
        if len(likely) != 1:
            raise CheckpointError(
                f"where does the optimizer lie? The checkpoint has {self._shown()}, of which {len(found)} have "
                "param_groups; say optimizer_key="
            )
        return likely[0]

    def _known(self, key: str, option: str) -> str:
        if key and key not in self._tops:
            raise CheckpointError(f"{option}={key!r} is not in the checkpoint, which has {self._shown()}")
        return key

    def _shown(self) -> str:
        return ", ".join(map(repr, self._tops[:10])) + (", ..." if len(self._tops) > 10 else "")

    def nested(self, model: torch.nn.Module) -> dict[str, Any]:
        """The model's part of a target. A module takes no new keys."""
        state = model.state_dict()
        return {self.model: Closed(state)} if self.model else dict(state)

    def taken(self, target: Mapping[str, Any]) -> Mapping[str, Any]:
        return target[self.model] if self.model else target


def _require_fit(metadata: Metadata, keys: _Keys, model: torch.nn.Module, policy: Policy) -> set[str]:
    """Show, before the model is changed, that its tensors can be loaded; returns the names of those that will not be.

    Raises:
        MismatchError: they cannot.
    """
    target = keys.nested(model)
    leaves = flatten(target)
    found = match(target, leaves, StateDictEditor(target), metadata, policy)
    mismatches = dict.fromkeys(found.mismatches, ())
    if policy.unexpected == "error":
        mismatches |= dict.fromkeys(unexpected_mismatches(found.outcomes, metadata), ())
    if mismatches:
        raise mismatch_error(mismatches, found.outcomes)
    hollow = [
        key
        for key, outcome in found.outcomes.items()
        if outcome.status == "missing" and leaves[key].is_tensor and leaves[key].value.device.type == "meta"
    ]
    if hollow:
        raise CheckpointError(
            f"the checkpoint lacks {', '.join(hollow[:10])}, and the model has no values to keep for them: they are on "
            "the meta device. Nothing was changed. Build the model with these tensors in host memory"
        )
    start = f"{keys.model}." if keys.model else ""
    return {key[len(start) :] for key, outcome in found.outcomes.items() if outcome.status == "missing"}


def _saved_groups(key: str, options: Mapping[str, Any]) -> list[Any]:
    """The saved ``param_groups``."""
    found: dict[str, Any] = {key: {"param_groups": []}}
    api.load(found, only=f"{key}.param_groups*", **options)
    return list(found[key]["param_groups"])


def _slots(optimizer: torch.optim.Optimizer, groups: Sequence[Any], key: str) -> dict[Any, _Slot]:
    """The parameter for each number, or name, under which the checkpoint has a parameter's state.

    Raises:
        CheckpointError: the optimizer's groups are not those that were saved.
    """
    saved = [list(group["params"]) for group in groups]
    have = [len(group["params"]) for group in optimizer.param_groups]
    if [len(names) for names in saved] != have:
        raise CheckpointError(
            f"the optimizer's parameter groups do not fit {key!r}: the checkpoint has groups of "
            f"{[len(names) for names in saved]} parameters, the optimizer of {have}. Nothing was changed. Give the "
            "optimizer the groups it had when it was saved"
        )
    return {
        name: _Slot(param, {**group, **{k: v for k, v in saved_group.items() if k != "params"}}, number)
        for number, (names, group, saved_group) in enumerate(zip(saved, optimizer.param_groups, groups))
        for name, param in zip(names, group["params"])
    }


@dataclass(frozen=True)
class _Part:
    """A part of an optimizer's saved state: a tensor of a shape and dtype, or an object without them."""

    key: str
    path: Path
    slot: _Slot
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    place: Placement | None = None

    def value(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """A tensor to load into: the optimizer's own, or a new one."""
        if self.shape is None or self.dtype is None:
            return None
        there = self.existing(optimizer)
        if there is not None:
            return there
        place = self.slot.placement(str(self.path[-1]), self.shape) if self.place is None else self.place
        return make(self.shape, self.dtype, place)

    def existing(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """The optimizer's own tensor, if data can be loaded into it and it lies where its parameter does."""
        here: Any = optimizer.state.get(self.slot.param, {})
        for element in self.path[3:]:
            if not isinstance(here, Mapping) or element not in here:
                return None
            here = here[element]
        if not isinstance(here, torch.Tensor) or here.shape != self.shape or here.device.type == "meta":
            return None
        return here if not here.ndim or here.device.type == self.slot.param.device.type else None


def _saved_state(slots: Mapping[Any, _Slot], parts: Sequence[_Part]) -> list[SavedState]:
    """What the checkpoint has for each parameter."""
    shapes: dict[int, dict[str, torch.Size | None]] = {id(slot): {} for slot in slots.values()}
    for part in parts:
        shapes[id(part.slot)][str(part.path[3])] = part.shape if len(part.path) == 4 else None
    return [SavedState(str(name), slot.param, slot.number, shapes[id(slot)]) for name, slot in slots.items()]


def _parts(
    metadata: Metadata,
    top: str,
    slots: Mapping[Any, _Slot],
    placement: Place | None,
) -> list[_Part]:
    """What the checkpoint has of the optimizer's state.

    Raises:
        CheckpointError: it belongs to no parameter, or cannot be where ``placement`` says.
    """
    by_text = {str(name): slot for name, slot in slots.items()}
    parts: list[_Part] = []
    for key, path in _state_paths(metadata, top):
        slot = by_text.get(str(path[2]))
        if slot is None:
            raise CheckpointError(
                f"{key!r} is the state of a parameter that none of the saved groups has. Nothing was changed. Save the "
                "optimizer's state_dict() as it is"
            )
        part = _Part(key, path, slot)
        saved = metadata.state_dict_metadata[key]
        if isinstance(saved, TensorStorageMetadata):
            shape, dtype = torch.Size(saved.size), saved.properties.dtype
            part = replace(part, shape=shape, dtype=dtype)
            if placement is not None:
                place = placement(key, shape, dtype)
                try:
                    require_place(place, shape)
                except ValueError as error:
                    raise CheckpointError(
                        f"cannot create {key!r}, of shape {tuple(shape)}, where placement= says: {error}. Nothing "
                        "was changed"
                    ) from error
                part = replace(part, place=place)
        parts.append(part)
    return parts


def _optimizer_target(
    optimizer: torch.optim.Optimizer, slots: Mapping[Any, _Slot], groups: list[Any], parts: Sequence[_Part]
) -> tuple[dict[str, Any], set[str]]:
    """A state dict for ``optimizer`` with all that the checkpoint has for it, and the keys that are new in it."""
    with_state = {str(part.path[2]) for part in parts}
    state: dict[Any, Any] = {name: {} for name in slots if str(name) in with_state}
    target = {"state": state, "param_groups": groups}
    created = {part.key for part in parts if part.existing(optimizer) is None}
    StateDictEditor(target).insert((part.path[1:], part.value(optimizer)) for part in parts)
    return target, created


def _state_paths(metadata: Metadata, top: str) -> Iterator[tuple[str, Path]]:
    for key, path in paths_of(metadata).items():
        if len(path) > 3 and str(path[0]) == top and path[1] == "state":
            yield key, path


def _set_what_is_made_anew(model: torch.nn.Module, loaded: Mapping[str, Any]) -> None:
    """Hand a module what its ``state_dict`` does not share with it: extra state, or what quantized modules unpack."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    own = {alias_of(tensor) for tensor in tensors.values()}
    rest = OrderedDict(
        (key, value)
        for key, value in loaded.items()
        if key not in tensors and not (isinstance(value, torch.Tensor) and alias_of(value) in own)
    )
    if rest:
        # Modules tell by it in which format their state is.
        rest._metadata = getattr(model.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
        model.load_state_dict(rest, strict=False)


def _sharded_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` with what lies in host memory and is as large as its parameter on devices, sharded like that."""
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    by_name = dict(zip(names, params))
    state: dict[Any, Any] = {
        name: dict(own) if isinstance(own, dict) else own for name, own in state_dict["state"].items()
    }
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, own in state.items():
        if name not in by_name or not isinstance(own, dict):
            continue
        param = by_name[name]
        for part, value in own.items():
            if _is_on_host(value) and param.device.type == "xla" and value.shape == param.shape and value.ndim:
                own[part] = make(value.shape, value.dtype, param)
                pairs.append((own[part], value))
    copy_into(pairs, access_of)
    return {**state_dict, "state": state}


def _is_on_host(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"

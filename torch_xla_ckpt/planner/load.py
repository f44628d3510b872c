"""SPMDLoadPlanner: DCP's interface for loading into sharded tensors, and the coordinator's decisions."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from torch_xla_ckpt.device import access_of
from torch_xla_ckpt.errors import CheckpointError, Mismatch
from torch_xla_ckpt.planner.match import LOADED, merged
from torch_xla_ckpt.planner.mismatches import mismatch_error, require_same_kept_keys, unexpected_mismatches
from torch_xla_ckpt.planner.ongoing import LoadOptions, OngoingLoad, Place
from torch_xla_ckpt.planner.policy import Dtype, Missing, Policy, Rename, Shape, Unexpected
from torch_xla_ckpt.protocols import LoadSink, TensorAccess
from torch_xla_ckpt.reports import LoadReport, Outcome
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.serialization import AllowedType, decode

logger = logging.getLogger(__name__)

_NAMED = 5  # keys that the warning about optimizer state names


@dataclass(frozen=True)
class LocalMatch:
    """What a rank sends to the coordinator with its reads.

    Args:
        outcomes: the rank's outcome of every key.
        mismatches: keys that make the load fail.
        kept: keys that have another shape in the checkpoint, under ``shape="keep"``.
        unsharded_state: keys of optimizer state that will be created whole in host memory, beside sharded tensors.
    """

    outcomes: Mapping[str, Outcome]
    mismatches: Sequence[Mismatch] = ()
    kept: Sequence[Mismatch] = ()
    unsharded_state: Sequence[str] = ()


class SPMDLoadPlanner(LoadPlanner, LoadSink):
    """Loads a DCP checkpoint, saved on any mesh, in place into a state dict that may hold sharded XLA tensors.

    Pass it to ``dcp.load``. Afterwards ``report`` tells the outcome of every key::

        planner = xc.SPMDLoadPlanner(missing="warn")
        dcp.load(state, storage_reader=reader, planner=planner)
        print(planner.report)

    Every target tensor keeps its sharding. Each distinct box is read once, into one host buffer that all local
    replicas share. A tensor goes to its devices when all its boxes are complete. Before anything is read, all keys are
    matched, and saved chunks are proven to cover every box. When everything else is complete, objects are set, and
    values that the target lacked are inserted. ``docs/restoring.md`` has examples.

    Args:
        missing: what to do if the checkpoint lacks keys of the target. "error" (default): fail, listing all of them.
            "warn": keep the target's values and name the keys in a warning. "keep": keep the values without a warning.
        unexpected: what to do if the target lacks keys of the checkpoint, in a part of the tree that the target names.
            A target that names only "model" does not request keys under "optim". "restore" (default): create the
            objects and tensors, and insert them in the target's nested dicts and lists. "warn": leave the keys out and
            name them in a warning. "error": fail, listing all of them. "ignore": leave them out. In a flat target of
            tensors nothing is created, and "restore" warns.
        dtype: what to do if a tensor has another dtype in the checkpoint. "cast" (default): convert to the target's
            dtype, and name the keys in a warning. "error": fail, listing all of them.
        shape: what to do if a tensor has another shape in the checkpoint. "error" (default): fail, listing all of
            them. "keep": keep the target's values, read nothing for these keys, and name them in the report and in a
            warning. A tensor in the target and an object in the checkpoint are an error in either case.
        rename: new names for keys of the checkpoint. A mapping from saved keys to target keys, or a function from a
            saved key to its new name or None. Several new names for one key fill several tensors (tied weights).
            Prefixes of wrappers (``_orig_module``, ``_orig_mod``, ``module``) need no renaming.
        only: globs of the keys to load; default: all keys.
        exclude: globs of keys to leave alone. Keys that ``only`` and ``exclude`` leave out are neither missing nor
            unexpected.
        placement: where to create tensors that the target lacks. A function of key, shape and dtype that returns a
            device, a (mesh, partition spec) pair, a tensor to imitate, or None for host memory.
        allow_types: types that objects in the checkpoint may have, in addition to harmless types of builtins, numpy,
            datetime, collections and pathlib. Loading a type runs its constructor or ``__setstate__``.
        trust_pickle: load any object, running the code that the file names. Only for files that you would execute.
        access: returns the access that writes to a tensor. The default suits every tensor; simulated hosts pass their
            own.

    Raises (inside DCP's ``CheckpointException``, as every error of a planner; ``torch_xla_ckpt.load`` unwraps it):
        MismatchError: keys do not fit, and the policy does not allow that. All of them are listed.
        IncompleteCheckpointError: the saved chunks do not cover a needed box exactly once.
        UnsafeObjectError: an object has a type that is not allowed.
        CheckpointError: ``rename``, ``only`` or ``exclude`` name keys that do not exist, or ``placement`` does not fit
            a tensor.
    """

    def __init__(
        self,
        *,
        missing: Missing = "error",
        unexpected: Unexpected = "restore",
        dtype: Dtype = "cast",
        shape: Shape = "error",
        rename: Rename | None = None,
        only: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        placement: Place | None = None,
        allow_types: Sequence[AllowedType] = (),
        trust_pickle: bool = False,
        access: Callable[[torch.Tensor], TensorAccess] = access_of,
    ):
        policy = Policy(missing, unexpected, dtype, rename, _as_tuple(only), _as_tuple(exclude), shape)
        self._options = LoadOptions(policy, placement, tuple(allow_types), trust_pickle, access)
        self._ongoing: OngoingLoad | None = None

    @property
    def outcomes(self) -> Mapping[str, Outcome]:
        """The outcome of every key; the same on every rank. Empty until planning is done."""
        return {} if self._ongoing is None else self._ongoing.outcomes

    @property
    def planned_at(self) -> float:
        """When planning was done, by ``time.perf_counter``; 0 before."""
        return 0.0 if self._ongoing is None else self._ongoing.planned_at

    @property
    def put_seconds(self) -> float:
        """Seconds spent on moving tensors to their devices."""
        return 0.0 if self._ongoing is None else self._ongoing.put_seconds

    @property
    def report(self) -> LoadReport:
        """The report of the last load: the outcome of every key, and seconds.

        ``bytes_needed`` and ``bytes_read`` are None, because only the storage reader counts bytes. ``plan_seconds``
        begins when DCP hands the metadata to the planner. ``torch_xla_ckpt.load`` returns a complete report.

        Raises:
            CheckpointError: this planner has completed no load.
        """
        report = None if self._ongoing is None else self._ongoing.report
        if report is None:
            raise CheckpointError(
                "this planner has no report, because it has not completed a load. Read planner.report after dcp.load "
                "has returned"
            )
        return report

    @property
    def _load(self) -> OngoingLoad:
        if self._ongoing is None:
            raise CheckpointError("this planner has no state dict yet. Call set_up_planner first, as dcp.load does")
        return self._ongoing

    @without_collector
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if metadata is None:
            raise CheckpointError(
                "the storage reader returned no metadata, and nothing can be loaded without it. Use a storage reader "
                "whose read_metadata returns DCP's Metadata"
            )
        self._ongoing = None
        self._ongoing = OngoingLoad(state_dict, metadata, self._options)

    @without_collector
    def create_local_plan(self) -> LoadPlan:
        load = self._load
        if load.match.mismatches:  # the coordinator raises the error, for all ranks
            return LoadPlan([], planner_data=LocalMatch(dict(load.match.outcomes), load.match.mismatches))
        items, outcomes = load.plan_reads()
        return LoadPlan(items, planner_data=LocalMatch(outcomes, (), load.match.kept, load.unsharded_state))

    @without_collector
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        local: list[LocalMatch] = [plan.planner_data for plan in global_plan]
        outcomes = merged(one.outcomes for one in local)
        mismatches: dict[Mismatch, tuple[int, ...]] = {}
        for rank, one in enumerate(local):
            for mismatch in one.mismatches:
                mismatches[mismatch] = (*mismatches.get(mismatch, ()), rank)
        if self._options.policy.unexpected == "error":
            mismatches |= dict.fromkeys(unexpected_mismatches(outcomes, self._load.metadata), ())
        if mismatches:
            raise mismatch_error(mismatches, outcomes, len(local))
        require_same_kept_keys([one.outcomes for one in local], [one.kept for one in local])
        self._log_outcomes(outcomes)
        _warn_of_unsharded_state(list(dict.fromkeys(key for one in local for key in one.unsharded_state)))
        return [replace(plan, planner_data=outcomes) for plan in global_plan]

    def _log_outcomes(self, outcomes: Mapping[str, Outcome]) -> None:
        """Warn of keys that were not simply loaded; info about created keys."""
        special = {key: outcome for key, outcome in outcomes.items() if outcome is not LOADED}

        def keys(status: str) -> list[str]:
            return [key for key, outcome in special.items() if outcome.status == status]

        casts = [(key, outcome.cast) for key, outcome in special.items() if outcome.cast]
        _warn_of_keys("were cast to the target's dtype", [f"{key} ({a} -> {b})" for key, (a, b) in casts])
        shapes = [(key, outcome.shapes) for key, outcome in special.items() if outcome.shapes]
        _warn_of_keys(
            "have another shape in the checkpoint, and keep the target's values",
            [f"{key} (target {target}, checkpoint {saved})" for key, (saved, target) in shapes],
        )
        policy = self._options.policy
        if policy.missing == "warn":
            _warn_of_keys("are missing from the checkpoint, and keep the target's values", keys("missing"))
        if policy.unexpected != "ignore":
            _warn_of_keys("are missing from the target, and were not loaded", keys("unexpected"))
        if created := keys("created"):
            logger.info("these keys were missing from the target, and were created: %s", ", ".join(created))

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self._load.begin_reading(central_plan.planner_data)
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self._load.receive_object(key, decode(key, value, self._options.allow_types, self._options.trust_pickle))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._load.buffer(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._load.commit(read_item)

    def adopt(self, read_item: ReadItem, tensor: torch.Tensor) -> bool:
        return self._load.adopt(read_item, tensor)

    def buffer_bytes(self, key: str) -> int:
        return self._load.buffer_bytes(key)

    def undo(self) -> None:
        """Remove created values from the target, and put its old objects back. Loaded tensors keep their new data."""
        if self._ongoing is not None:
            self._ongoing.undo()


def _as_tuple(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _warn_of_keys(fact: str, keys: Sequence[str]) -> None:
    if keys:
        logger.warning("these keys %s: %s", fact, ", ".join(keys))


def _warn_of_unsharded_state(keys: Sequence[str]) -> None:
    if keys:
        logger.warning(
            "optimizer state was missing from the target, and was created whole in host memory, although the target "
            "has sharded tensors: %s%s. optimizer.load_state_dict would put all of it on every device. Restore with "
            "torch_xla_ckpt.restore(path, model=..., optimizer=...), or call torch_xla_ckpt.prime_optimizer(optimizer) "
            "before optimizer.state_dict(), or pass placement=",
            ", ".join(keys[:_NAMED]),
            f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "",
        )

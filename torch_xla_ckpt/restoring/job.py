"""The restore of modules, optimizers and everything else of one checkpoint, step by step."""

from __future__ import annotations

import glob
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import api
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    MismatchError,
    ReplacedCheckpointError,
    UnsafeObjectError,
)
from torch_xla_ckpt.planner import Place, Policy
from torch_xla_ckpt.reports import LoadReport, Outcome
from torch_xla_ckpt.restoring.keys import TopLevelKeys
from torch_xla_ckpt.restoring.materialize import Materialization, Sharding
from torch_xla_ckpt.restoring.modules import Unfilled, require_fit, set_what_is_made_anew, target_of
from torch_xla_ckpt.restoring.optimizers import OptimizerRestore, saved_groups
from torch_xla_ckpt.storage import ShardReader

logger = logging.getLogger(__name__)

_Together = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Job:
    """One call of ``restore``: its arguments, with the modules and optimizers that were passed by name.

    Args:
        modules, optimizers: modules and optimizers that were passed under their keys.
        state: everything else to load; ``run`` puts loaded values in.
    """

    model: torch.nn.Module | None
    optimizer: torch.optim.Optimizer | None
    modules: Mapping[str, torch.nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    state: dict[str, Any]
    sharding: Sharding | None
    mesh: Any
    placement: Place | None
    model_key: str | None
    optimizer_key: str | None
    policy: Policy

    def run(self, reader: ShardReader, options: Mapping[str, Any]) -> LoadReport:
        """Restore from the checkpoint that is there now.

        Args:
            reader: reads the checkpoint.
            options: options of ``load``, without those of its policy.

        Raises:
            ReplacedCheckpointError: another save replaced the checkpoint meanwhile. Tensors that were loaded in place
                by then hold new values; all else is as it was.
        """
        doing = f"restoring from {reader.location}"
        processes = Processes(options["process_group"], options["no_dist"])
        together = partial(processes.agreed, doing)
        with api.reading_together(reader, processes, options["cooperative"], doing):
            with together():
                metadata = reader.read_metadata()
                models, optimizers = self._keyed(TopLevelKeys(metadata), metadata)
            with reader.pinned():
                return self._restored(metadata, models, optimizers, options, together)

    def _keyed(
        self, keys: TopLevelKeys, metadata: Metadata
    ) -> tuple[dict[str, torch.nn.Module], dict[str, torch.optim.Optimizer]]:
        """Return all modules, and the optimizers that have something to load, by their keys in the checkpoint.

        Raises:
            CheckpointError: a key cannot be told, is not in the checkpoint, or is given twice.
        """
        models, optimizers = dict(self.modules), dict(self.optimizers)
        found: list[str] = []
        if self.model is not None:
            found.append(keys.of_model(self.model, self.model_key))
            models[found[-1]] = self.model
        if self.optimizer is not None:
            found.append(keys.of_optimizer(self.optimizer_key))
            optimizers[found[-1]] = self.optimizer
        taken = {key for key in found if key} & {*self.modules, *self.optimizers, *self.state}
        if taken or len(set(found)) < len(found):
            raise CheckpointError(
                f"{', '.join(map(repr, sorted(taken or set(found))))} was passed twice: the checkpoint has the model "
                "or the optimizer there. Nothing was changed. Leave the key out of the state, or pass model_key= or "
                "optimizer_key="
            )
        for key in self.modules:
            if key not in keys and self.policy.missing == "error" and self.policy.rename is None:
                raise CheckpointError(
                    f"the checkpoint has no module {key!r}. It has: {keys}. Nothing was changed. Pass model= and "
                    'model_key=, or missing="warn" to keep the values that the module has'
                )
        for key in self.optimizers:
            if key not in keys:
                if self.policy.missing == "error":
                    raise CheckpointError(
                        f"the checkpoint has no optimizer {key!r}. It has: {keys}. Nothing was changed. Pass "
                        'optimizer= and optimizer_key=, or missing="warn" to keep the optimizer as it is'
                    )
                logger.warning("the checkpoint has no optimizer %r, which stays as it is. It has: %s", key, keys)
                del optimizers[key]
        return models, {key: value for key, value in optimizers.items() if self._asks_for_any(key, metadata)}

    def _asks_for_any(self, key: str, metadata: Metadata) -> bool:
        return any(one.startswith(f"{key}.") and self.policy.asks_for(one) for one in metadata.state_dict_metadata)

    def _restored(
        self,
        metadata: Metadata,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        options: Mapping[str, Any],
        together: _Together,
    ) -> LoadReport:
        groups = {key: saved_groups(key, options) for key in sorted(optimizers)}
        with together():
            others = {**self.state, **{key: {} for key in optimizers}}
            unfilled = require_fit(metadata, models, others, self.policy) if models else Unfilled()
            restores = {
                key: OptimizerRestore(
                    key, optimizer, groups[key], metadata, self.placement, self.policy, unfilled.other_shape
                )
                for key, optimizer in optimizers.items()
            }
            modules = Materialization(models, self.sharding, self.mesh, unfilled.tensors)
        with _put_back_if_it_fails(modules, optimizers.values()):
            with together():
                modules.run()
            target: dict[str, Any] = {**self.state, **target_of(models)}
            created: set[str] = set()
            for key, one in restores.items():
                target[key], new = one.target()
                created |= new
            kept = [key for one in restores.values() for key in one.kept_keys]
            with _saying_that_tensors_were_loaded():
                report = api.load(target, **_policy_options(self.policy, kept), placement=self.placement, **options)
                with together():
                    for key, module in models.items():
                        set_what_is_made_anew(module, target[key] if key else target)
                    for key, one in restores.items():
                        one.finish(target[key])
        self.state.update({key: target[key] for key in self.state})
        return replace(report, outcomes=_outcomes(report.outcomes, created, kept))


def _policy_options(policy: Policy, kept: Sequence[str]) -> dict[str, Any]:
    """Return a policy as options of ``load``, with ``kept`` keys left out of the load."""
    options = {field.name: getattr(policy, field.name) for field in fields(policy)}
    return {**options, "exclude": (*policy.exclude, *map(glob.escape, kept))}


def _outcomes(outcomes: Mapping[str, Outcome], created: set[str], kept: Sequence[str]) -> dict[str, Outcome]:
    """Return outcomes that say which of an optimizer's state is new to it, and which was not loaded into it."""
    changed = {key: replace(one, status="created") for key, one in outcomes.items() if _is_new(key, one, created)}
    return {**outcomes, **changed, **dict.fromkeys(kept, Outcome("kept"))}


def _is_new(key: str, outcome: Outcome, created: set[str]) -> bool:
    return key in created and outcome.status == "loaded"


@contextmanager
def _put_back_if_it_fails(modules: Materialization, optimizers: Collection[torch.optim.Optimizer]) -> Iterator[None]:
    """Undo, if the block fails, the changes to modules' tensors and to optimizers' groups and state.

    Tensors that were on devices already, and have been loaded by then, keep the loaded values.
    """
    before = [(optimizer, optimizer.param_groups, optimizer.state) for optimizer in optimizers]
    try:
        yield
    except BaseException:
        modules.undo()
        for optimizer, groups, state in before:
            optimizer.param_groups, optimizer.state = groups, state
        raise
    modules.forget()


@contextmanager
def _saying_that_tensors_were_loaded() -> Iterator[None]:
    """Add to an error of the block that tensors may hold new values, unless the error comes before any are loaded."""
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

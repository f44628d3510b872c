"""Restoring a step: what a restore is asked to do, and where the run starts if it has no step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from torch_xla_ckpt import api
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager.newest import NewestStep
from torch_xla_ckpt.manager.origin import Origin, origin_of
from torch_xla_ckpt.manager.rng import RNG_KEY, Generators
from torch_xla_ckpt.manager.run import Run
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.reports import LoadReport
from torch_xla_ckpt.restoring import OPTIONS, Sharding, require_restorable, restore
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import Location, ShardReader

logger = logging.getLogger(__name__)

# Options of ``torch_xla_ckpt.restore`` that a manager does not take, and what to do instead.
_ELSEWHERE = {
    "path": "the manager restores from its own path. To start from another one, pass initial_path= to it",
    "storage_reader": "use torch_xla_ckpt.restore with the path of a step",
    "storage_options": "pass storage_options= to CheckpointManager",
    "process_group": "pass process_group= to CheckpointManager",
    "no_dist": "use torch_xla_ckpt.restore with the path of a step",
    "verify": "use torch_xla_ckpt.restore with the path of a step",
    "progress": "use torch_xla_ckpt.restore with the path of a step to see a progress bar",
}
# Options that the manager's methods declare themselves.
_DECLARED = ("model", "optimizer", "sharding", "mesh")
LOAD_OPTIONS = tuple(name for name in OPTIONS if name not in (*_DECLARED, *_ELSEWHERE, "state"))
"""Keyword arguments of ``restore`` and ``restore_latest`` that go to ``torch_xla_ckpt.restore`` as they are."""


@dataclass(frozen=True)
class RestoreRequest:
    """What one call of ``restore`` or ``restore_latest`` is asked to do.

    Args:
        state_dict: the state to fill, by top-level key. Values that cannot be filled in place are replaced in it.
        named: more of the state, by top-level key. All of these values can be filled in place.
        options: policies for keys that do not fit, as for ``torch_xla_ckpt.load``.
        model, optimizer, sharding, mesh: see ``torch_xla_ckpt.restore``.
    """

    state_dict: dict[str, Any] | None
    named: Mapping[str, Any]
    options: Mapping[str, Any]
    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    sharding: Sharding | None = None
    mesh: Any = None

    @classmethod
    def of(
        cls, call: str, state_dict: dict[str, Any] | None, given: Mapping[str, Any], **others: Any
    ) -> RestoreRequest:
        """Tell options from state, and refuse what would be lost.

        Args:
            call: the manager's method, for error messages.
            state_dict: the positional argument.
            given: the keyword arguments that the method does not declare.
            others: the other fields of the request.

        Raises:
            TypeError: a keyword argument is neither an option nor a value that can be filled in place.
        """
        if state_dict is not None and not isinstance(state_dict, dict):
            kind = type(state_dict).__name__
            raise TypeError(
                f"{call}() takes a dict as its state, not a {kind}. Nothing was changed. Pass a {kind} by its key in "
                f"the checkpoint, such as {call}(model=...)"
            )
        named = {name: value for name, value in given.items() if name not in LOAD_OPTIONS}
        for name, value in named.items():
            _require_state(call, name, value)
        both = sorted(named.keys() & (state_dict or {}).keys())
        if both:
            raise TypeError(f"{call}() was given {', '.join(map(repr, both))} twice: in the dict and by keyword")
        options = {name: value for name, value in given.items() if name in LOAD_OPTIONS}
        return cls(state_dict, named, options, **others)

    @property
    def needs_restore(self) -> bool:
        """True if there is a module or an optimizer, which ``load`` alone would neither build nor shard."""
        state = {**(self.state_dict or {}), **self.named}
        built = (self.model, self.optimizer, *state.values())
        return any(isinstance(value, (torch.nn.Module, torch.optim.Optimizer)) for value in built)

    def model_only(self) -> RestoreRequest:
        """Return the part of this request that concerns models: modules, or else the key "model".

        Raises:
            CheckpointError: the request has neither.
        """
        state = {**(self.state_dict or {}), **self.named}
        modules = {key: value for key, value in state.items() if isinstance(value, torch.nn.Module)}
        if not modules and self.model is None:
            if "model" not in state:
                raise CheckpointError(
                    'initial="model" needs the model, and the call names none. Pass model=, or a state with the key '
                    '"model"'
                )
            modules = {"model": state["model"]}
        return replace(self, state_dict=None, named=modules, optimizer=None)


@dataclass(frozen=True)
class Initial:
    """What a run without a step of its own starts from.

    Args:
        path: another run, or a checkpoint.
        what: which part of the state to take from there.
        storage_options: for fsspec's filesystem.
    """

    path: Location
    what: Literal["all", "model"]
    storage_options: Mapping[str, Any] | None


class Restorer:
    """Restores steps of a run, and starts a new run from another one.

    Args:
        run: the run.
        rng: True to restore the random generators too.
        initial: what the run starts from; None to start from nothing.

    Attributes:
        report: what became of every key in the last restore; None before the first.
    """

    def __init__(self, run: Run, rng: bool, initial: Initial | None):
        self._run = run
        self._processes = run.processes
        self._rng = rng
        self._initial = initial
        self.report: LoadReport | None = None

    def step(self, step: int, request: RestoreRequest) -> None:
        """Restore a committed step."""
        self._load(self._run.steps.at(step), request, self._rng)

    def latest(self, request: RestoreRequest) -> int | None:
        """Restore the newest step that is whole; without any, load what the run starts from.

        Returns:
            The step; None if the run has no step of its own.

        Raises:
            CheckpointError: there are steps, but all of them are damaged.
        """
        newest = NewestStep(self._run.steps, self._processes)
        step = newest.restore(lambda step: self.step(step, request))
        if step is None:
            newest.require_none()
            self._require_run()
            if self._initial is not None:
                self._start_from(self._initial, request)
        return step

    def _require_run(self) -> None:
        """Check that the run's folder is not itself a checkpoint, such as one step of a run.

        Raises:
            CheckpointError: it is one, so training would start from nothing by mistake.
        """
        steps, place = self._run.steps, self._run.steps.location
        doing = f"looking for a checkpoint in {place}"
        look = functools.partial(steps.retries.run, lambda: METADATA in steps.root.names(), doing)
        if self._processes.from_first(look, doing):
            raise CheckpointError(
                f"{place} is the folder of one checkpoint, not of a run, so there are no steps below it. Nothing was "
                "restored. Restore it with torch_xla_ckpt.restore, or pass it as initial_path= to a manager of another "
                "folder; for a step of a run, give the manager the folder above"
            )

    def _start_from(self, initial: Initial, request: RestoreRequest) -> None:
        """Load another run's newest step, or a checkpoint."""
        request = request if initial.what == "all" else request.model_only()
        origin: Origin = self._processes.from_first(
            lambda: origin_of(initial.path, initial.storage_options),
            f"looking for a step in initial_path={initial.path}",
        )
        source = origin.location
        load: Callable[[Location], None] = functools.partial(self._load, request=request, rng=False)
        if origin.is_run:
            newest = NewestStep(Steps(source, closed=self._run.closing), self._processes)
            step = newest.restore(lambda step: load(origin.location.child(str(step))))
            if step is None:
                newest.require_none()
                raise CheckpointError(
                    f"initial_path={initial.path} leads to {source}, whose steps were all deleted just now"
                )
            source = source.child(str(step))
        else:
            load(source)
        logger.info("the run has no step of its own, and starts with %s of %s", initial.what, source)
        if self._processes.rank == 0:
            self._run.journal.write("began", source=source.url, what=initial.what)

    def _load(self, path: Location, request: RestoreRequest, rng: bool) -> None:
        target = {**(request.state_dict or {}), **request.named}
        if rng:
            target[RNG_KEY] = Generators(self._processes.rank, empty=True)
        common: dict[str, Any] = {
            "storage_reader": ShardReader(path),
            "process_group": self._processes.group,
            "no_dist": self._processes.alone,
            **request.options,
        }
        if request.needs_restore:
            self.report = restore(
                model=request.model,
                optimizer=request.optimizer,
                state=target,
                sharding=request.sharding,
                mesh=request.mesh,
                **common,
            )
        else:
            _require_no_keys(request)
            self.report = api.load(target, **common)
        if request.state_dict is not None:
            request.state_dict.update({key: target[key] for key in request.state_dict})


def _require_no_keys(request: RestoreRequest) -> None:
    """Refuse options that name the key of a model or an optimizer which was not passed.

    Raises:
        TypeError: naming the option.
    """
    for name in ("model_key", "optimizer_key"):
        if name in request.options:
            raise TypeError(f"{name}= was given without {name.removesuffix('_key')}=. Nothing was changed")


def _require_state(call: str, name: str, value: object) -> None:
    """Refuse a keyword argument that is an option of another function, or that nothing can be restored into.

    Raises:
        TypeError: naming the key and the right call.
    """
    remedy = (
        f"state = {{{name!r}: {value!r}}}; manager.{call}(state). Or save and restore a dict that you keep, such as "
        f"progress={{{name!r}: {value!r}}}"
    )
    if call == "restore_latest":
        remedy += ". The number of the step is what restore_latest returns"
    try:
        require_restorable(name, value, call=call, remedy=remedy, options=(*_DECLARED, *LOAD_OPTIONS))
    except TypeError:
        if name not in _ELSEWHERE:
            raise
        raise TypeError(f"{call}() has no option {name!r}. Nothing was changed. Instead, {_ELSEWHERE[name]}") from None

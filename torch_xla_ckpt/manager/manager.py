"""CheckpointManager: the object that a training loop holds."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager import keep as keeping
from torch_xla_ckpt.manager import when as saving
from torch_xla_ckpt.manager.catalog import Catalog, best_policy
from torch_xla_ckpt.manager.history import History
from torch_xla_ckpt.manager.keep import KeepLike
from torch_xla_ckpt.manager.preemption import Preemption
from torch_xla_ckpt.manager.restores import Initial, Restorer, RestoreRequest
from torch_xla_ckpt.manager.run import Run
from torch_xla_ckpt.manager.saves import Saver, SaveRequest, WriterOptions
from torch_xla_ckpt.manager.schedule import Schedule
from torch_xla_ckpt.manager.verdicts import Verdict
from torch_xla_ckpt.manager.when import WhenLike
from torch_xla_ckpt.reports import LoadReport
from torch_xla_ckpt.restoring import Sharding
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.staging import ClosesOnExit, SPMDStager
from torch_xla_ckpt.storage import REQUEST_TIMEOUT, Location


class CheckpointManager(ClosesOnExit):
    """Saves the steps of a run below one path, keeps those that a policy wants, and restores the newest.

    A replacement for ``torch_xla.experimental.distributed_checkpoint.CheckpointManager``: positional arguments and
    methods are the same, and steps that torch_xla's manager wrote are found. Every process of the run creates a manager
    at the same point, and calls ``save``, ``save_async``, ``should_save``, ``reached_preemption``, ``restore`` and
    ``restore_latest`` at the same steps. A manager lives as long as the training loop: use it as a context manager, or
    call ``close``.

    Args:
        path: folder or fsspec URL of the run. Each step has a folder below it, named by the step's number.
        save_interval: save at multiples of this number of steps. Short for ``when.Every(steps=...)``.
        max_to_keep: keep this number of the latest steps; None and 0 keep all. Short for ``keep.Latest(...)``.
        max_pending_async: number of async saves that may be under way; another one waits. Default: 1.
        num_of_threads: number of files that each process writes at a time. Default: see ``ShardWriter``.
        process_group: the processes that save together. Default: all. A single process needs no group.
        chkpt_on_preemption: save when the machine is about to be preempted. Default: True.
        when: a policy that decides when to save (``torch_xla_ckpt.when``). Adds to ``save_interval``.
        keep: a retention policy (``torch_xla_ckpt.keep``). Adds to ``max_to_keep``. Default: keep all steps.
        rng: also save and restore the random generators of each process: torch, numpy, Python, the devices' seed.
        initial_path: path of another run or of a checkpoint. ``restore_latest`` loads it while this run has no step.
        initial: which part of ``initial_path`` to load: "all" (default), or only the "model".
        stager: makes the copies for async saves. Default: a stager of the manager's own, in mode "auto".
        device_memory_limit: bytes on each device that the copies of that stager may take; see ``SPMDStager``.
        sync: whether a committed step must survive a power failure. Default: True; see ``ShardWriter``.
        memory_budget: host memory in bytes for data that waits to be written. Default: 256 MiB; see ``ShardWriter``.
        storage_options: options for fsspec's filesystem.
        request_timeout: seconds that a remote store may take for one request. Default: 600.
        timeout: how long processes wait for each other. Default: 30 minutes.

    Raises:
        ValueError: an option has an impossible value.
        CheckpointError: the path cannot be written, or the processes do not all see the same folder there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        save_interval: int | None = None,
        max_to_keep: int | None = 0,
        max_pending_async: int = 1,
        num_of_threads: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        chkpt_on_preemption: bool = True,
        *,
        when: WhenLike | None = None,
        keep: KeepLike | None = None,
        rng: bool = False,
        initial_path: str | os.PathLike[str] | None = None,
        initial: Literal["all", "model"] = "all",
        stager: SPMDStager | None = None,
        device_memory_limit: int | None = None,
        sync: bool = True,
        memory_budget: int = 256 << 20,
        storage_options: Mapping[str, Any] | None = None,
        request_timeout: float = REQUEST_TIMEOUT,
        timeout: timedelta = timedelta(minutes=30),
    ):
        if (save_interval is not None and save_interval <= 0) or (max_to_keep or 0) < 0 or max_pending_async <= 0:
            raise ValueError("save_interval and max_pending_async must be positive, max_to_keep must not be negative")
        if initial not in ("all", "model"):
            raise ValueError(f'initial must be "all" or "model", not {initial!r}')
        location = Location.of(path, storage_options, request_timeout=request_timeout)
        start: Initial | None = None
        if initial_path is not None:
            source = Location.of(initial_path, storage_options, request_timeout=request_timeout)
            start = Initial(source, initial, storage_options)
        self.base_path = os.path.join(location.url, "")
        self.save_interval = save_interval
        self.max_to_keep = max_to_keep
        self.chkpt_on_preemption = chkpt_on_preemption
        when = saving.joined(when, save_interval, chkpt_on_preemption)
        self._keep = keeping.joined(keep, max_to_keep)
        self._is_closed = False
        self._owner = forks.Owner()
        self._run = Run(location, process_group, self._keep, timeout)
        self._catalog = Catalog(self._run.steps, self.base_path)
        self._own_stager = stager is None
        self._stager = stager or SPMDStager(
            max_pending=max_pending_async,
            process_group=process_group,
            timeout=timeout,
            device_memory_limit=device_memory_limit,
        )
        doing = f"looking for the newest step of {self.base_path}"
        last = self._run.processes.from_first(self._run.steps.latest, doing)
        self._preemption = Preemption(chkpt_on_preemption)
        self._schedule = Schedule(when, self._preemption, self._run.processes, self._run.active, self.base_path)
        self._schedule.restored(last)
        writing = WriterOptions(num_of_threads, sync, memory_budget)
        self._saver = Saver(self._run, self._schedule, self._stager, writing, rng)
        self._restorer = Restorer(self._run, rng, start)

    # The methods of torch_xla's manager

    def should_save(self, step: int) -> bool:
        """Return whether a policy wants this step saved; the same answer on all ranks."""
        self._require_own()
        return self._schedule.is_due(step)

    def save(
        self,
        step: int,
        state_dict: dict[str, Any],
        force: bool = False,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Any = None,
    ) -> bool:
        """Save a step now, if a policy wants it saved.

        Args:
            step: the step's number. A step that exists already is replaced.
            state_dict: the state to save; see ``torch_xla_ckpt.save``.
            force: save even if no policy wants the step. Default: False.
            metrics: numbers, or tensors with one element, for ``keep.Best``, ``best_step`` and ``history``.
            metadata: anything that is JSON, to be stored with the step.

        Returns:
            True if the step was saved.

        Raises:
            CheckpointError: the save failed; or it succeeded, and an earlier async save failed.
        """
        step = _number(step)
        if not self._is_due(step, force, is_async=False):
            return False
        self._saver.save(SaveRequest(step, state_dict, metrics, metadata))
        return True

    def save_async(
        self,
        step: int,
        state_dict: dict[str, Any],
        force: bool = False,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Any = None,
    ) -> bool:
        """Begin an async save of a step, if a policy wants it saved. Return when the state may change.

        Args:
            step, state_dict, force, metrics, metadata: see ``save``.

        Returns:
            True if the step is being saved.

        Raises:
            CheckpointError: the state cannot be copied; or this save has begun, and an earlier async save failed.
        """
        step = _number(step)
        if not self._is_due(step, force, is_async=True):
            return False
        self._saver.save_async(SaveRequest(step, state_dict, metrics, metadata))
        return True

    def restore(
        self,
        step: int,
        state_dict: dict[str, Any] | None = None,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        sharding: Sharding | None = None,
        mesh: Any = None,
        **state: Any,
    ) -> None:
        """Restore a step, in place. ``report`` tells what became of every key.

        Args:
            step: the number of a committed step.
            state_dict: nested dicts to fill, as for ``torch_xla_ckpt.load``.
            model, optimizer, sharding, mesh: see ``torch_xla_ckpt.restore``.
            state: more of what was saved, by top-level key: modules and optimizers under any name, schedulers and
                other ``Stateful``s, dicts, tensors. Also the options of ``torch_xla_ckpt.load``: ``missing``,
                ``unexpected``, ``dtype``, ``shape``, ``rename``, ``only``, ``exclude``, ``placement``,
                ``allow_types``, ``trust_pickle``; and ``model_key`` and ``optimizer_key`` of
                ``torch_xla_ckpt.restore``.

        Raises:
            TypeError: a value in ``state`` cannot be filled in place, or an option is misspelt.
            CheckpointError: there is no such step; or ``torch_xla_ckpt.restore`` failed.
        """
        request = RestoreRequest.of(
            "restore", state_dict, state, model=model, optimizer=optimizer, sharding=sharding, mesh=mesh
        )
        doing = f"restoring step {step} of {self.base_path}"
        self._run.processes.from_first(lambda: self._catalog.require(step), doing)
        self._restorer.step(step, request)

    def all_steps(self) -> list[int]:
        """Return the committed steps, ascending, without those that were found to be damaged.

        Lists the run's folder every time. The first call also looks into each step's folder.

        Raises:
            CheckpointError: the storage does not answer.
        """
        return self._run.steps.restorable()

    def join(self) -> None:
        """Wait for async saves; the same as ``wait``."""
        self.wait()

    def reached_preemption(self, step: int) -> bool:
        """Return whether the machine is about to be preempted; true on all ranks at the same step."""
        self._require_own()
        return self._schedule.is_preempted(step)

    def _get_path(self, step: int) -> str:
        return os.path.join(self.base_path, str(step))

    # Additional methods

    def restore_latest(
        self,
        state_dict: dict[str, Any] | None = None,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        sharding: Sharding | None = None,
        mesh: Any = None,
        **state: Any,
    ) -> int | None:
        """Restore the newest step that is whole, in place. A warning names each damaged step that is skipped.

        Args:
            state_dict, model, optimizer, sharding, mesh, state: see ``restore``.

        Returns:
            The step that was restored. None if the run has no step, even if ``initial_path`` was loaded.

        Raises:
            TypeError: a value in ``state`` cannot be filled in place, or an option is misspelt.
            CheckpointError: there are steps, but all of them are damaged; or ``torch_xla_ckpt.restore`` failed.
        """
        request = RestoreRequest.of(
            "restore_latest", state_dict, state, model=model, optimizer=optimizer, sharding=sharding, mesh=mesh
        )
        step = self._restorer.latest(request)
        if step is not None:
            self._schedule.restored(step)
        return step

    def latest_step(self) -> int | None:
        """Return the newest committed step that was not found to be damaged; None if there is none."""
        return self._run.steps.latest()

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] = "min") -> int | None:
        """Return the committed step with the best value of a metric; None if no step has the metric.

        Args:
            metric: the metric's name. Default: the metric and mode of the manager's ``keep.Best`` policy.
            mode: "min" (default) if lower values are better, "max" if higher values are.

        Raises:
            ValueError: no metric was given, and there is no ``keep.Best`` policy.
        """
        best = best_policy(self._keep) if metric is None else keeping.Best(1, metric, mode)
        if best is None:
            raise ValueError("say which metric: best_step('loss', mode='min'), or give the manager a keep.Best policy")
        return self._catalog.best(best)

    def metrics(self, step: int) -> Mapping[str, float]:
        """Return the metrics that a committed step was saved with."""
        return self._catalog.saved(step).metrics

    def metadata(self, step: int) -> Any:
        """Return the metadata that a committed step was saved with."""
        return self._catalog.saved(step).metadata

    def plan_retention(self) -> tuple[Verdict, ...]:
        """Return for every step whether it would be deleted now, and why. Deletes nothing."""
        return self._run.plan_retention()

    def history(self) -> History:
        """Return the saves of the run: sizes, durations, metrics, and which steps are gone. ``print`` shows a table.

        Waits until every save that has ended is recorded.
        """
        if self._owner.is_here and not self._is_closed:
            self._saver.wait_for_journal()
        return self._run.journal.history()

    @property
    def report(self) -> LoadReport | None:
        """What became of every key in the last restore; None before the first."""
        return self._restorer.report

    def wait(self) -> None:
        """Wait until all async saves are committed, and the steps they make superfluous are deleted.

        Not a collective. All ranks wait for the deletions of rank 0.

        Raises:
            CheckpointError: an async save failed, and no call has raised its error yet.
        """
        self._saver.wait()

    def close(self) -> None:
        """Wait for async saves and deletions, and put back the SIGTERM handler that was installed before.

        In a forked child this does nothing: the saves are the parent's.

        Raises:
            CheckpointError: an async save failed, and no call has raised its error yet.
        """
        if self._is_closed or not self._owner.is_here:
            return
        self._is_closed = True
        self._preemption.stop_listening()
        try:
            if self._own_stager:
                self._stager.close()
            else:
                self._stager.wait()
        finally:
            self._schedule.close()
            self._run.close()

    def _is_due(self, step: int, force: bool, *, is_async: bool) -> bool:
        if self._is_closed:
            raise CheckpointError("the manager is closed. Create another one to save more steps")
        self._schedule.is_async = is_async
        try:
            return self.should_save(step) or force  # all ranks must ask, even if force is given
        finally:
            self._schedule.is_async = None

    def _require_own(self) -> None:
        if not self._owner.is_here:
            raise CheckpointError(self._owner.refusal("manager"))


def _number(step: int) -> int:
    """Return a step's number as an integer.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is negative.
    """
    number = int(operator.index(step))
    if number < 0:
        raise ValueError(f"a step must not be negative, got {step}")
    return number

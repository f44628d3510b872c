"""CheckpointManager: the object a training loop holds."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from torch_xla_ckpt import _dcp, api, forks
from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.manager import keep as keeping
from torch_xla_ckpt.manager import when as saving
from torch_xla_ckpt.manager.journal import History, Journal
from torch_xla_ckpt.manager.keep import KeepLike, Saved
from torch_xla_ckpt.manager.preemption import Agreement, Terminated
from torch_xla_ckpt.manager.retention import Retention, Verdict
from torch_xla_ckpt.manager.rng import Generators
from torch_xla_ckpt.manager.steps import KEY, Steps
from torch_xla_ckpt.manager.when import WhenLike
from torch_xla_ckpt.materialize import Sharding
from torch_xla_ckpt.report import LoadReport
from torch_xla_ckpt.restoring import restore
from torch_xla_ckpt.staging import SPMDStager
from torch_xla_ckpt.storage import ShardReader, ShardWriter
from torch_xla_ckpt.storage.files import Folder
from torch_xla_ckpt.storage.location import Location

logger = logging.getLogger(__name__)

RNG_KEY = "rng_of_processes"
T = TypeVar("T")


class CheckpointManager:
    """Saves the steps of a run below one path, keeps those that are worth it, and brings the newest back.

    A replacement for ``torch_xla.experimental.distributed_checkpoint.CheckpointManager``: the same positional arguments
    and methods, and what that wrote is found. Every process of the run creates one at the same point, and calls
    ``save``, ``save_async``, ``should_save``, ``reached_preemption`` and ``restore`` at the same steps. It lives as
    long as the training loop: a context manager, or to be closed.

    Args:
        path: folder or fsspec URL of the run. Each step has a folder below it, named by its number.
        save_interval: save every so many steps; short for ``when.Every(steps=...)``.
        max_to_keep: keep the latest so many; short for ``keep.Latest(...)``. None and 0 mean all.
        max_pending_async: saves that may be under way in the background; another one waits.
        num_of_threads: how many files each process writes at a time; default: see ``ShardWriter``.
        process_group: the processes that save together; default: all. Not needed for a single process.
        chkpt_on_preemption: save when the machine is about to be taken away.
        when: when to save (``torch_xla_ckpt.when``), besides ``save_interval``.
        keep: what to keep (``torch_xla_ckpt.keep``), besides ``max_to_keep``. Default: all.
        rng: also save and restore the random generators of each process: torch, numpy, python, the devices' seed.
        initial_path: another run's path, or a checkpoint, to begin with if this run has no step of its own.
        initial: what to take from there: "all" or only the "model".
        stager: for saves in the background; default: one of the manager's own, in mode "auto".
        device_memory_limit: for that stager; see ``SPMDStager``.
        sync, memory_budget, storage_options: see ``ShardWriter``.
        timeout: how long processes wait for each other.

    Raises:
        ValueError: an option makes no sense.
        CheckpointError: the path cannot be written, or not all processes see the same folder there.
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
        timeout: timedelta = timedelta(minutes=30),
    ):
        if (save_interval is not None and save_interval <= 0) or (max_to_keep or 0) < 0 or max_pending_async <= 0:
            raise ValueError("save_interval and max_pending_async must be positive, max_to_keep must not be negative")
        if initial not in ("all", "model"):
            raise ValueError(f'initial must be "all" or "model", not {initial!r}')
        location = Location.of(path, storage_options)
        self.base_path = os.path.join(location.url, "")
        self.save_interval = save_interval
        self.max_to_keep = max_to_keep
        self.chkpt_on_preemption = chkpt_on_preemption
        self._when = _joined(when, save_interval, chkpt_on_preemption)
        self._keep = _kept(keep, max_to_keep)
        self._rng = rng
        self._initial = (None if initial_path is None else Location.of(initial_path, storage_options), initial)
        self._writing: dict[str, Any] = {
            "threads": num_of_threads,
            "sync": sync,
            "memory_budget": memory_budget,
        }
        self._steps = Steps(location)
        steps = self._steps
        self._journal = Journal(lambda: steps.root)
        self._report: LoadReport | None = None
        self._closed = False
        self._owner = forks.Owner()
        self._counts = _Counts()
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1
        self._group = _dcp.new_group(process_group, timeout) if several else None
        self._rank = dist.get_rank(self._group) if self._group is not None else 0
        self._preflight()
        self._own_stager = stager is None
        self._stager = stager or SPMDStager(
            max_pending=max_pending_async,
            process_group=process_group,
            timeout=timeout,
            device_memory_limit=device_memory_limit,
        )
        self._retention = (
            Retention(self._steps, self._keep, self._journal, self._counts.busy) if self._rank == 0 else None
        )
        self._last = max(self._agreed(self.all_steps), default=None)
        self._terminated = Terminated()
        self._notice: Callable[[int], bool] | None = None
        self._noticed = False
        self._farewell: int | None = None  # the step that was saved because of preemption
        if chkpt_on_preemption:
            self._listen()
        self._agreement = Agreement(self._group, self._terminated.was_received)

    # What torch_xla's manager has.

    def should_save(self, step: int) -> bool:
        """Whether a policy wants this step saved. The same answer in all processes."""
        preempted, seconds = self._facts(step)
        farewell = preempted and self._farewell in (None, step)  # which is said once
        return self._when.due(saving.Now(step, self._last, seconds, farewell))

    def save(
        self,
        step: int,
        state_dict: dict[str, Any],
        force: bool = False,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Any = None,
    ) -> bool:
        """Save a step now, if it is due.

        Args:
            step: its number. One that is there already is replaced.
            state_dict: see ``torch_xla_ckpt.save``.
            force: save whether it is due or not.
            metrics: for ``keep.Best``, ``best_step`` and ``history``. Numbers, or tensors of one element.
            metadata: anything that is JSON, to be kept with the step.

        Returns:
            Whether it was saved.

        Raises:
            CheckpointError: it could not be; or, after it was, what an earlier save in the background failed with.
        """
        if not self._is_due(step, force):
            return False
        call = _Call(metrics)
        with self._saving(step), call:
            api.save(
                self._with_rng(state_dict),
                storage_writer=self._writer(step, call, metadata),
                process_group=self._group,
                no_dist=self._group is None,
            )
        self._stager.raise_failed()
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
        """Save a step in the background, if it is due: returns when the state may change.

        Args:
            step, state_dict, force, metrics, metadata: see ``save``.

        Returns:
            Whether it is being saved.

        Raises:
            CheckpointError: the state cannot be copied; or what an earlier save in the background failed with.
        """
        if not self._is_due(step, force):
            return False
        call = _Call(metrics)
        with ExitStack() as until_ended:
            until_ended.enter_context(self._saving(step))
            with call:
                writer = self._writer(step, call, metadata)
                handle = api.async_save(self._with_rng(state_dict), stager=self._stager, storage_writer=writer)
                call.mode = handle.choice.mode
            release = until_ended.pop_all()
            handle.upload_completion.add_done_callback(lambda _: release.close())
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
        """Bring a step back, in place. ``report`` says what became of every key.

        Args:
            step: a committed one.
            state_dict: nested dicts as for ``torch_xla_ckpt.load``.
            model, optimizer, sharding, mesh: see ``torch_xla_ckpt.restore``.
            state: more of what was saved, by key: schedulers, data loaders and other ``Stateful``s, dicts.

        Raises:
            CheckpointError: there is no such step; and as ``torch_xla_ckpt.restore`` does.
        """
        if step not in self._agreed(self.all_steps):
            raise CheckpointError(f"there is no step {step} in {self.base_path}. There are: {self.all_steps()}")
        self._restore(self._steps.at(step), state_dict, state, model, optimizer, sharding, mesh, self._rng)

    def all_steps(self) -> list[int]:
        """The committed steps, ascending. Looks every time, so it is the same in all processes."""
        return [step for step in self._steps.committed() if step not in self._steps.damaged]

    def join(self) -> None:
        """As ``wait``."""
        self.wait()

    def reached_preemption(self, step: int) -> bool:
        """Whether the machine is about to be taken away; true in all processes at the same step."""
        return self._facts(step)[0]

    def _get_path(self, step: int) -> str:
        return os.path.join(self.base_path, str(step))

    # What it has not.

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
        """Bring the newest step back that is whole; see ``restore``.

        Steps that are damaged are skipped, with a warning that says what is wrong with them.

        Returns:
            The step; None if the run has none of its own, also when ``initial_path`` was loaded.

        Raises:
            CheckpointError: there are steps, and all of them are damaged; and as ``restore``.
        """
        skipped: dict[int, str] = {}
        while True:
            step, found = self._agreed(lambda: self._newest(set(skipped)))
            skipped.update(found)
            if step is None:
                break
            try:
                self._restore(self._steps.at(step), state_dict, state, model, optimizer, sharding, mesh, self._rng)
            except (CorruptCheckpointError, IncompleteCheckpointError) as error:
                skipped[step] = str(error)
                continue
            self._skip(skipped)
            self._last = step
            return step
        if skipped:
            raise CheckpointError(
                f"{self.base_path} has steps, and none of them can be restored:\n  "
                + "\n  ".join(f"{step}: {why}" for step, why in skipped.items())
                + "\nTo begin anew, use another path"
            )
        self._import(state_dict, state, model, optimizer, sharding, mesh)
        return None

    def latest_step(self) -> int | None:
        """The newest committed step."""
        return max(self.all_steps(), default=None)

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] = "min") -> int | None:
        """The committed step with the best value of a metric; by default that of the ``keep.Best`` policy.

        Raises:
            ValueError: no metric was given, and there is no such policy.
        """
        best = _best_of(self._keep) if metric is None else keeping.Best(1, metric, mode)
        if best is None:
            raise ValueError("say which metric: best_step('loss', mode='min'), or give the manager a keep.Best policy")
        ranked = best.ranked(self._saved())
        return ranked[0].step if ranked else None

    def metrics(self, step: int) -> Mapping[str, float]:
        """The metrics that a committed step was saved with."""
        return self._one(step).metrics

    def metadata(self, step: int) -> Any:
        """The metadata that a committed step was saved with."""
        return self._one(step).metadata

    def plan_retention(self) -> tuple[Verdict, ...]:
        """What would be deleted now, and why, for every step; deletes nothing."""
        retention = self._retention or Retention(self._steps, self._keep, self._journal, self._counts.busy)
        return retention.plan()

    def history(self) -> History:
        """The saves of the run: metrics, sizes, durations. ``print`` it, with ``rich.print`` if rich is there."""
        return self._journal.history()

    @property
    def report(self) -> LoadReport | None:
        """What became of every key in the last restore."""
        return self._report

    def wait(self) -> None:
        """Wait until what is being saved is committed, and what it makes superfluous is deleted.

        Raises:
            CheckpointError: a save in the background failed, and it was not raised before.
        """
        self._stager.wait()
        if self._retention is not None:
            self._retention.wait()

    def close(self) -> None:
        """Wait, and let go of everything. Puts back the SIGTERM handler that was there before.

        In a forked child this does nothing: the saves are the parent's.

        Raises:
            CheckpointError: as ``wait``.
        """
        if self._closed or not self._owner.is_here:
            return
        self._closed = True
        self._terminated.restore()
        try:
            if self._own_stager:
                self._stager.close()
            else:
                self._stager.wait()
        finally:
            if self._retention is not None:
                self._retention.close()
            self._agreement.close()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            logger.error("a save in the background failed too: %s", failed)  # the block's own error goes first

    # How.

    def _facts(self, step: int) -> tuple[bool, float]:
        self._require_own()
        preempted, seconds = self._agreement.at(step)
        if self._notice is not None:
            self._noticed = self._noticed or self._notice(step)
        return preempted or self._noticed, seconds

    def _is_due(self, step: int, force: bool) -> bool:
        if self._closed:
            raise CheckpointError("the manager is closed; create another one")
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"a step must not be negative, got {step}")
        if not (self.should_save(step) or force):  # the question is asked in any case: all processes ask it together
            return False
        if self._facts(step)[0] and self._farewell is None:
            self._farewell = step
            logger.warning("step %s is saved because the machine is about to be taken away", step)
        self._agreement.saving()
        self._last = step
        self._steps.damaged.pop(step, None)
        return True

    def _writer(self, step: int, call: _Call, metadata: Any) -> ShardWriter:
        user = {KEY: {"metrics": call.metrics, "metadata": metadata}}
        writer = _Writer(self._steps.at(step), step=step, user_metadata=user, **self._writing)
        writer.retention, writer.call = self._retention, call
        return writer

    def _with_rng(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if not self._rng:
            return state_dict
        if RNG_KEY in state_dict:
            raise CheckpointError(f"the state has the key {RNG_KEY!r}, where rng=True puts the random generators")
        return {**state_dict, RNG_KEY: Generators(self._rank)}

    def _saving(self, step: int) -> _Saving:
        return _Saving(self._counts, step)

    def _require_own(self) -> None:
        if not self._owner.is_here:
            raise CheckpointError(self._owner.refusal("manager"))

    def _saved(self) -> list[Saved]:
        """What is known of the committed steps that can be restored, ascending."""
        looks = self._steps.committed().items()
        return [self._steps.saved(step, look) for step, look in looks if self._steps.flaw(step, look) is None]

    def _one(self, step: int) -> Saved:
        look = self._steps.committed().get(step)
        if look is None:
            raise CheckpointError(f"there is no step {step} in {self.base_path}. There are: {self.all_steps()}")
        return self._steps.saved(step, look)

    def _newest(self, skipped: set[int]) -> tuple[int | None, dict[int, str]]:
        """The newest step without an obvious flaw, and the flaws of those that are newer."""
        found: dict[int, str] = {}
        for step, look in sorted(self._steps.committed().items(), reverse=True):
            if step not in skipped:
                flaw = self._steps.flaw(step, look, thorough=True)
                if flaw is None:
                    return step, found
                found[step] = flaw
        return None, found

    def _skip(self, skipped: Mapping[int, str]) -> None:
        for step, why in skipped.items():
            self._steps.damaged[step] = why
            logger.warning("step %s of %s is skipped, because it is damaged: %s", step, self.base_path, why)

    def _restore(
        self,
        path: Location,
        state_dict: dict[str, Any] | None,
        more: dict[str, Any],
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        sharding: Sharding | None,
        mesh: Any,
        rng: bool,
    ) -> None:
        target = {**(state_dict or {}), **more, **({RNG_KEY: Generators(self._rank, empty=True)} if rng else {})}
        reader = ShardReader(path)
        together: dict[str, Any] = {"process_group": self._group, "no_dist": self._group is None}
        if model is None and optimizer is None:
            self._report = api.load(target, storage_reader=reader, **together)
        else:
            self._report = restore(
                model=model,
                optimizer=optimizer,
                state=target,
                sharding=sharding,
                mesh=mesh,
                storage_reader=reader,
                **together,
            )
        for key in state_dict or {}:
            assert state_dict is not None
            state_dict[key] = target[key]

    def _import(
        self,
        state_dict: dict[str, Any] | None,
        more: dict[str, Any],
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        sharding: Sharding | None,
        mesh: Any,
    ) -> None:
        """Begin with another run's state, if that was asked for."""
        path, what = self._initial
        if path is None:
            return
        others = Steps(path)
        newest = self._agreed(lambda: max(others.committed(), default=None))
        source = path if newest is None else others.at(newest)
        logger.info("the run has no step of its own, and begins with %s of %s", what, source)
        if what == "all":
            self._restore(source, state_dict, more, model, optimizer, sharding, mesh, rng=False)
        elif model is not None:
            self._restore(source, None, {}, model, None, sharding, mesh, rng=False)
        elif "model" in (state_dict or {}):
            assert state_dict is not None
            self._restore(source, {"model": state_dict["model"]}, {}, None, None, None, None, rng=False)
        else:
            raise CheckpointError('initial="model" needs the model: pass model=, or a state that has "model"')

    def _listen(self) -> None:
        """Begin to notice preemption. Whatever is in the way is logged: a manager must not fail for that."""
        if "torch_xla" in sys.modules:
            from torch_xla_ckpt.device import xla

            try:
                self._notice = xla.preemption_notice()
            except Exception as error:
                logger.warning("torch_xla's preemption sync does not work here (%s); listening to SIGTERM", error)
        if self._notice is None:
            self._terminated.install()

    def _agreed(self, find: Callable[[], T]) -> T:
        """What rank 0 finds, in all processes; its error too."""
        if self._group is None:
            return find()
        self._require_own()
        found: list[Any] = [None, None]
        if self._rank == 0:
            try:
                found[0] = find()
            except Exception as error:
                found[1] = f"rank 0: {error}" if isinstance(error, CheckpointError) else f"rank 0: {error!r}"
        dist.broadcast_object_list(found, src=dist.get_global_rank(self._group, 0), group=self._group)
        if found[1] is not None:
            raise CheckpointError(found[1])
        return found[0]

    def _preflight(self) -> None:
        """Show that the folder can be written, and that all processes see the same one.

        Raises:
            CheckpointError: naming those that do not.
        """
        name = f"preflight-{secrets.token_hex(8)}"

        def write() -> str:
            folder = self._steps.root
            try:
                folder.make()
                folder.replace(name, b"", f"{name}.tmp")
            except OSError as error:
                raise CheckpointError(f"{self.base_path} cannot be written: {error}") from error
            return name

        token = self._agreed(write)
        if self._group is not None:
            blind: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(blind, _blindness(self._steps.root, token), group=self._group)
        else:
            blind = []
        if self._rank == 0:
            self._steps.root.remove([name])
        if any(blind):
            ranks = self._group and dist.get_process_group_ranks(self._group)
            who = ", ".join(str(rank) for rank, reason in zip(ranks or itertools.count(), blind) if reason)
            raise CheckpointError(
                f"ranks {who} do not see what rank 0 has written to {self.base_path} "
                f"({next(filter(None, blind))}). All processes must be given one shared folder: with a local disk on "
                "each host, every one of them would keep a part that cannot be restored"
            )


class _Writer(ShardWriter):
    """Writes when what the save before made superfluous is deleted: the disk need hold one save more than it keeps."""

    retention: Retention | None
    call: _Call

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.retention is not None:
            self.retention.make_room()
        return super().prepare_local_plan(plan)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        seconds = time.perf_counter() - self.call.start
        if self.retention is not None and self._step is not None:
            self.retention.committed(self._step, lambda: self.call.facts(seconds))


class _Call:
    """A call to ``save`` or ``save_async``: how long it blocks, and with which metrics."""

    def __init__(self, metrics: Mapping[str, float] | None):
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        # JSON has no NaN and no infinity.
        self.metrics = {name: value for name, value in numbers.items() if value - value == 0}
        self.mode = "sync"
        self.start = time.perf_counter()
        self._blocked = 0.0
        self._returned = threading.Event()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self._blocked = time.perf_counter() - self.start
        self._returned.set()

    def facts(self, seconds: float) -> dict[str, Any]:
        """For the journal, once the call has returned."""
        self._returned.wait()
        seconds = max(seconds, self._blocked)
        return {"metrics": self.metrics, "blocked_seconds": self._blocked, "seconds": seconds, "mode": self.mode}


class _Counts:
    """How many saves of each step are under way."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._renew()
        forks.renew_in_child(self, _Counts._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def busy(self) -> set[int]:
        """The steps that are being saved."""
        with self._lock:
            return {step for step, count in self._counts.items() if count}

    def add(self, step: int, count: int) -> None:
        with self._lock:
            self._counts[step] = self._counts.get(step, 0) + count


class _Saving:
    """Counts a save of a step as being under way."""

    def __init__(self, counts: _Counts, step: int):
        self._counts, self._step = counts, step

    def __enter__(self) -> None:
        self._counts.add(self._step, 1)

    def __exit__(self, *exception: object) -> None:
        self._counts.add(self._step, -1)


def _blindness(folder: Folder, token: str) -> str | None:
    try:
        missing = folder.missing({token: 0})
    except OSError as error:
        return str(error)
    return f"{token} is not there" if missing else None


def _joined(when: WhenLike | None, save_interval: int | None, chkpt_on_preemption: bool) -> saving.When:
    policies = [] if when is None else [saving.policy(when)]
    if save_interval is not None:
        policies.append(saving.Every(steps=save_interval))
    if chkpt_on_preemption:
        policies.append(saving.OnPreemption())
    return saving.AnyOf(tuple(policies))


def _kept(keep: KeepLike | None, max_to_keep: int | None) -> keeping.Keep:
    policies = [] if keep is None else [keeping.policy(keep)]
    if max_to_keep:
        policies.append(keeping.Latest(max_to_keep))
    return keeping.AnyOf(tuple(policies)) if policies else keeping.All()


def _best_of(policy: keeping.Keep) -> keeping.Best | None:
    if isinstance(policy, keeping.AnyOf):
        return next(filter(None, map(_best_of, policy.policies)), None)
    return policy if isinstance(policy, keeping.Best) else None

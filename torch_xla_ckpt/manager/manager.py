"""CheckpointManager: the object a training loop holds."""

from __future__ import annotations

import functools
import logging
import operator
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from torch_xla_ckpt import api
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.device import lazy
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager import keep as keeping
from torch_xla_ckpt.manager import when as saving
from torch_xla_ckpt.manager.agreement import Agreement
from torch_xla_ckpt.manager.facts import KEY
from torch_xla_ckpt.manager.journal import History, Journal
from torch_xla_ckpt.manager.keep import KeepLike, Saved
from torch_xla_ckpt.manager.newest import Newest, Origin, origin_of
from torch_xla_ckpt.manager.preemption import SigtermListener
from torch_xla_ckpt.manager.retention import Retention, Verdict
from torch_xla_ckpt.manager.rng import Generators
from torch_xla_ckpt.manager.saves import Call, UnderWay, Writer
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.manager.sweeps import Sweeps
from torch_xla_ckpt.manager.when import WhenLike
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.reports import LoadReport
from torch_xla_ckpt.restoring import Sharding, restore
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.staging import SPMDStager, Upload
from torch_xla_ckpt.storage import REQUEST_TIMEOUT, Location, ShardReader, path_mismatch

logger = logging.getLogger(__name__)

RNG_KEY = "rng_of_processes"


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
        sync, memory_budget, storage_options, request_timeout: see ``ShardWriter``.
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
        request_timeout: float = REQUEST_TIMEOUT,
        timeout: timedelta = timedelta(minutes=30),
    ):
        if (save_interval is not None and save_interval <= 0) or (max_to_keep or 0) < 0 or max_pending_async <= 0:
            raise ValueError("save_interval and max_pending_async must be positive, max_to_keep must not be negative")
        if initial not in ("all", "model"):
            raise ValueError(f'initial must be "all" or "model", not {initial!r}')
        place = functools.partial(Location.of, storage_options=storage_options, request_timeout=request_timeout)
        location = place(path)
        self.base_path = os.path.join(location.url, "")
        self.save_interval = save_interval
        self.max_to_keep = max_to_keep
        self.chkpt_on_preemption = chkpt_on_preemption
        self._when = _joined(when, save_interval, chkpt_on_preemption)
        self._keep = _kept(keep, max_to_keep)
        self._rng = rng
        self._storage_options = storage_options
        self._initial = (None if initial_path is None else place(initial_path), initial)
        self._writing: dict[str, Any] = {
            "threads": num_of_threads,
            "sync": sync,
            "memory_budget": memory_budget,
        }
        self._timeout = timeout
        self._report: LoadReport | None = None
        self._is_closed = False
        self._owner = forks.Owner()
        self._closing = threading.Event()
        self._under_way = UnderWay()
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1
        self._group: dist.ProcessGroup | None = None
        if several:
            self._group = Processes(process_group).new_group(timeout, f"opening {self.base_path}")
        self._processes = Processes(self._group, alone=not several)
        self._sweeps = Sweeps(self._processes)
        self._steps = Steps(location, self._sweeps.known_retired, self._closing)
        self._journal = Journal(self._steps)
        self._preflight()
        self._own_stager = stager is None
        self._stager = stager or SPMDStager(
            max_pending=max_pending_async,
            process_group=process_group,
            timeout=timeout,
            device_memory_limit=device_memory_limit,
        )
        self._retention = self._new_retention() if self._processes.rank == 0 else None
        last = self._processes.from_first(self._steps.latest, f"looking for the newest step of {self.base_path}")
        self._terminated = SigtermListener()
        self._notice: Callable[[int], bool] | None = None
        self._noticed = False
        if chkpt_on_preemption:
            self._listen()
        self._agreement = Agreement(self._processes, self._terminated.was_received)
        self._agreement.restored(last)
        self._last_call = 0

    # What torch_xla's manager has.

    def should_save(self, step: int) -> bool:
        """Whether a policy wants this step saved. The same answer in all processes."""
        preempted, seconds = self._facts(step)
        farewell = preempted and self._agreement.farewell in (None, step)  # one save is enough
        return self._when.due(saving.Now(step, self._agreement.last, seconds, farewell))

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
        step = _number(step)
        if not self._is_due(step, force):
            return False
        number = self._begin(step)
        try:
            with self._processes.agreed(f"saving step {step} to {self.base_path}"):
                call, writer, state = self._prepared(step, state_dict, metrics, metadata)
            try:
                api.save(state, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
            finally:
                call.returned()
        except BaseException:
            self._agreement.failed(number, everywhere=True)
            self._ended(step, number, is_saved=False)
            raise
        self._ended(step, number, is_saved=True)
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
        step = _number(step)
        if not self._is_due(step, force):
            return False
        number = self._begin(step)
        with ExitStack() as if_refused:
            if_refused.callback(self._ended, step, number, is_saved=False)
            if_refused.callback(self._agreement.failed, number)
            try:
                call, writer, state = self._prepared(step, state_dict, metrics, metadata)
            except Exception as error:
                self._refuse(error)
            try:
                handle = api.async_save(state, stager=self._stager, storage_writer=writer)
                call.mode = handle.choice.mode
            finally:
                call.returned()
            if_refused.pop_all()
        handle.upload_completion.add_done_callback(functools.partial(self._uploaded, step, number))
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
        self._processes.from_first(lambda: self._require(step), f"restoring step {step} of {self.base_path}")
        self._restore(self._steps.at(step), state_dict, state, model, optimizer, sharding, mesh, self._rng)

    def all_steps(self) -> list[int]:
        """The committed steps, ascending, without those that were found to be damaged.

        Lists the run's folder every time. The first time it also looks into each step's folder.

        Raises:
            CheckpointError: the storage does not answer.
        """
        return self._steps.committed()

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
        together = functools.partial(self._restore, state_dict=state_dict, state=state, model=model)
        together = functools.partial(together, optimizer=optimizer, sharding=sharding, mesh=mesh)
        newest = Newest(self._steps, self._processes)
        step = newest.restore(lambda step: together(self._steps.at(step), rng=self._rng))
        if step is not None:
            self._agreement.restored(step)
            return step
        newest.require_none()
        self._import(together, state_dict, model)
        return None

    def latest_step(self) -> int | None:
        """The newest committed step that was not found to be damaged; None if there is none."""
        return self._steps.latest()

    def best_step(self, metric: str | None = None, mode: Literal["min", "max"] = "min") -> int | None:
        """The committed step with the best value of a metric; by default that of the ``keep.Best`` policy.

        Raises:
            ValueError: no metric was given, and there is no such policy.
        """
        best = _best_of(self._keep) if metric is None else keeping.Best(1, metric, mode)
        if best is None:
            raise ValueError("say which metric: best_step('loss', mode='min'), or give the manager a keep.Best policy")
        gone: set[int] = set()
        while True:
            ranked = best.ranked([one for one in self._saved() if one.step not in gone])
            if not ranked or self._steps.look(ranked[0].step, fresh=True).kind == "committed":
                return ranked[0].step if ranked else None
            gone.add(ranked[0].step)

    def metrics(self, step: int) -> Mapping[str, float]:
        """The metrics that a committed step was saved with."""
        return self._one(step).metrics

    def metadata(self, step: int) -> Any:
        """The metadata that a committed step was saved with."""
        return self._one(step).metadata

    def plan_retention(self) -> tuple[Verdict, ...]:
        """What would be deleted now, and why, for every step; deletes nothing."""
        return (self._retention or self._new_retention()).plan()

    def history(self) -> History:
        """The saves of the run: metrics, sizes, durations. ``print`` it, with ``rich.print`` if rich is there."""
        return self._journal.history()

    @property
    def report(self) -> LoadReport | None:
        """What became of every key in the last restore."""
        return self._report

    def wait(self) -> None:
        """Wait until what is being saved is committed, and what it makes superfluous is deleted.

        Not a collective, but all ranks wait for the deletions of rank 0.

        Raises:
            CheckpointError: a save in the background failed, and it was not raised before.
        """
        try:
            self._stager.wait()
        finally:
            if self._retention is not None:
                self._retention.wait()
            self._sweeps.wait(self._last_call, self._timeout)

    def close(self) -> None:
        """Wait, and let go of everything. Puts back the SIGTERM handler that was there before.

        In a forked child this does nothing: the saves are the parent's.

        Raises:
            CheckpointError: as ``wait``.
        """
        if self._is_closed or not self._owner.is_here:
            return
        self._is_closed = True
        self._terminated.restore()
        try:
            if self._own_stager:
                self._stager.close()
            else:
                self._stager.wait()
        finally:
            self._closing.set()
            if self._retention is not None:
                self._retention.close()
                self._journal.close()
                self._sweeps.over()
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
        with self._processes.worded(f"deciding whether to save step {step} to {self.base_path}"):
            preempted, seconds = self._agreement.at(step)
        if self._notice is not None:
            self._noticed = self._noticed or self._notice(step)
        return preempted or self._noticed, seconds

    def _is_due(self, step: int, force: bool) -> bool:
        if self._is_closed:
            raise CheckpointError("the manager is closed; create another one")
        return self.should_save(step) or force  # all processes ask together, whether or not force is given

    def _begin(self, step: int) -> int:
        """A save begins; returns the number of the call."""
        is_farewell = self._facts(step)[0] and self._agreement.farewell is None
        if is_farewell:
            logger.warning("step %s is saved because the machine is about to be taken away", step)
        self._under_way.begin(step)
        self._last_call = self._agreement.begin(step, is_farewell)
        return self._last_call

    def _prepared(
        self, step: int, state_dict: dict[str, Any], metrics: Mapping[str, float] | None, metadata: Any
    ) -> tuple[Call, Writer, dict[str, Any]]:
        """All that is needed for a save; raises what is wrong with the arguments of the call."""
        call = Call(metrics)
        user = {KEY: {"metrics": call.metrics, "metadata": metadata}}
        writer = Writer(self._steps.at(step), step=step, user_metadata=user, **self._writing)
        writer.retention, writer.call = self._retention, call
        return call, writer, self._with_rng(state_dict)

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise an error of a call to ``save_async``, and let the save fail on the other ranks too."""

        def state() -> dict[str, Any]:
            raise error

        def never(*_: object) -> NoReturn:
            raise error

        self._stager.run(state, never, None)
        raise error

    def _uploaded(self, step: int, number: int, upload: Any) -> None:
        """An async save has ended."""
        assert isinstance(upload, Upload)
        is_saved = upload.error() is None
        if not is_saved:
            self._agreement.failed(number)
        self._ended(step, number, is_saved=is_saved)

    def _ended(self, step: int, number: int, *, is_saved: bool) -> None:
        self._under_way.end(step)
        if self._retention is None:
            if is_saved:
                self._steps.saved(step)
            return
        if not is_saved:
            self._retention.failed(step)
        self._retention.after(lambda: self._sweeps.ended(number))

    def _new_retention(self) -> Retention:
        return Retention(self._steps, self._keep, self._journal, self._under_way.steps, self._sweeps.retired)

    def _with_rng(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if not self._rng:
            return state_dict
        if RNG_KEY in state_dict:
            raise CheckpointError(f"the state has the key {RNG_KEY!r}, where rng=True puts the random generators")
        return {**state_dict, RNG_KEY: Generators(self._processes.rank)}

    def _require_own(self) -> None:
        if not self._owner.is_here:
            raise CheckpointError(self._owner.refusal("manager"))

    def _saved(self) -> list[Saved]:
        """What is known of the committed steps, ascending. Reads their manifests, once."""
        return [one for one in self._steps.each(self._saved_or_none, self._steps.committed()) if one is not None]

    def _saved_or_none(self, step: int) -> Saved | None:
        try:
            return self._steps.facts(step).saved if self._steps.flaw(step) is None else None
        except FileNotFoundError:  # deleted just now
            return None

    def _one(self, step: int) -> Saved:
        self._require(step)
        try:
            return self._steps.facts(step).saved
        except FileNotFoundError as error:
            raise self._no_step(step) from error

    def _require(self, step: int) -> None:
        if self._steps.look(step, fresh=True).kind != "committed":
            raise self._no_step(step)

    def _no_step(self, step: int) -> CheckpointError:
        return CheckpointError(f"there is no step {step} in {self.base_path}. There are: {self.all_steps()}")

    def _restore(
        self,
        path: Location,
        state_dict: dict[str, Any] | None,
        state: dict[str, Any],
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        sharding: Sharding | None,
        mesh: Any,
        rng: bool,
    ) -> None:
        target = {
            **(state_dict or {}),
            **state,
            **({RNG_KEY: Generators(self._processes.rank, empty=True)} if rng else {}),
        }
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
        self, restore: Callable[..., None], state_dict: dict[str, Any] | None, model: torch.nn.Module | None
    ) -> None:
        """Begin with another run's state, if that was asked for."""
        path, what = self._initial
        if path is None:
            return
        if what == "all":
            load = functools.partial(restore, rng=False)
        elif model is not None:
            load = functools.partial(restore, state_dict=None, state={}, optimizer=None, rng=False)
        elif "model" in (state_dict or {}):
            assert state_dict is not None
            only = {"model": state_dict["model"]}
            none: dict[str, Any] = {"state": {}, "model": None, "optimizer": None, "sharding": None, "mesh": None}
            load = functools.partial(restore, state_dict=only, rng=False, **none)
        else:
            raise CheckpointError('initial="model" needs the model: pass model=, or a state that has "model"')
        doing = f"looking for a step in initial_path={path}"
        origin: Origin = self._processes.from_first(lambda: origin_of(path, self._storage_options), doing)
        source = origin.location
        if origin.is_run:
            newest = Newest(Steps(source, closed=self._closing), self._processes)
            step = newest.restore(lambda step: load(source.child(str(step))))
            if step is None:
                newest.require_none()
                raise CheckpointError(f"initial_path={path} leads to {source}, whose steps are all gone by now")
            source = source.child(str(step))
        else:
            load(source)
        logger.info("the run has no step of its own, and begins with %s of %s", what, source)
        if self._processes.rank == 0:
            self._journal.write("began", source=source.url, what=what)

    def _listen(self) -> None:
        """Begin to notice preemption. Whatever is in the way is logged: a manager must not fail for that."""
        if "torch_xla" in sys.modules:
            try:
                self._notice = lazy.xla.preemption_notice()
            except Exception as error:
                logger.warning("torch_xla's preemption sync does not work here (%s); listening to SIGTERM", error)
        if self._notice is None:
            self._terminated.install()

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
            except Exception as error:
                raise CheckpointError(f"{self.base_path} cannot be written: {error}") from error
            return name

        doing = f"opening {self.base_path}"
        token = self._processes.from_first(write, doing)
        seen = [] if self._processes.alone else self._processes.gather(self._sight(token), doing)
        if self._processes.rank == 0:
            try:
                self._steps.root.remove([name])
            except Exception as error:
                logger.warning(
                    "%s of %s could not be deleted (%s: %s). Without the permission to delete, no step is ever deleted",
                    *(name, self.base_path, type(error).__name__, error),
                )
        if any(reason for reason, _ in seen):
            who = ", ".join(str(rank) for rank, (reason, _) in zip(self._processes.ranks, seen) if reason)
            why = next(reason for reason, _ in seen if reason)
            apart = path_mismatch("looks", "in", [path for _, path in seen])
            raise CheckpointError(
                f"ranks {who} do not see what rank 0 has written to {seen[0][1]} ({why}). All processes must be given "
                "one shared folder: with a local disk on each host, every one of them would keep a part that cannot be "
                "restored"
                f"{apart and f'. {apart}'}"
            )

    def _sight(self, token: str) -> tuple[str | None, str]:
        """Why this process does not see a file, None if it does; and the run's folder, as this process names it."""
        return _visibility_error(self._steps.root, token), self._steps.location.identity


def _visibility_error(folder: Folder, token: str) -> str | None:
    """Why this process does not see a file; None if it does. A file is asked for by name: a listing may lag."""
    try:
        folder.read(token)
    except FileNotFoundError:
        return f"{token} is not there"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _number(step: int) -> int:
    """A step's number.

    Raises:
        TypeError, ValueError: it is none.
    """
    number = int(operator.index(step))
    if number < 0:
        raise ValueError(f"a step must not be negative, got {step}")
    return number


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

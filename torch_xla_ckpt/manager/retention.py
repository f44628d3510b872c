"""Deleting steps that a manager wrote and no policy wants, and nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager.facts import Facts
from torch_xla_ckpt.manager.journal import Journal
from torch_xla_ckpt.manager.keep import All, AnyOf, Keep, Saved, now
from torch_xla_ckpt.manager.steps import Steps

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_PAUSE = 0.5  # seconds before another attempt
_REFUSALS = 3  # steps that cannot be deleted, until no other is tried before the save returns
_FIRST_LOOK = 8  # steps whose files are looked at before the others'


@dataclass(frozen=True)
class Verdict:
    """What becomes of a step.

    Args:
        step: its number.
        kept: False if it will be deleted.
        reason: why.
    """

    step: int
    kept: bool
    reason: str


@dataclass(frozen=True)
class _Doomed:
    """A step that is being deleted.

    Args:
        step: its number.
        reason: why.
        facts: its files.
        stock: whether stock DCP wrote its files.
        is_retired: whether its commit is gone already.
    """

    step: int
    reason: str
    facts: Facts
    stock: bool
    is_retired: bool = False


class Retention:
    """Keeps what a policy wants. Commits go at once; the files that belonged to them go in a thread.

    Args:
        steps: the run's.
        keep: the policy.
        journal: to record deletions in.
        busy: returns the steps that are being saved now.
        tell: called with all deleted steps whose folders are still there, whenever they change.
    """

    def __init__(
        self,
        steps: Steps,
        keep: Keep,
        journal: Journal,
        busy: Callable[[], set[int]],
        tell: Callable[[frozenset[int]], object] = bool,
    ):
        self._steps = steps
        self._keep = keep
        self._journal = journal
        self._busy = busy
        self._tell = tell
        self._retired_steps: set[int] = set()  # whose folders are still there
        self._closed = threading.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="CheckpointManager")
        self._pending: list[Future[None]] = []
        self._cleaned = False
        self._undone: list[_Doomed] = []  # steps whose commit is gone and whose files could not be deleted
        self._litter: set[int] = set()  # steps of which a save has failed
        self._spared: set[int] = set()  # unwanted steps that no manager wrote, and that the log has named
        self._lock = threading.Lock()

    def plan(self) -> tuple[Verdict, ...]:
        """What would be deleted now, and why; deletes nothing. Reads the manifests of all steps, once."""
        found = self._steps.looks(self._steps.numbers())
        steps = [step for step, one in found.items() if one.kind in ("committed", "damaged")]
        flaws = dict(zip(steps, self._steps.each(self._flaw, steps)))
        return self._verdicts({step: flaw for step, flaw in flaws.items() if flaw != _GONE})

    def committed(self, step: int, save_id: str, nbytes: int, record: Callable[[], Mapping[str, Any]]) -> None:
        """A step has been committed: delete the commits that it makes superfluous, and their files in the background.

        Args:
            step: its number.
            save_id: of the save.
            nbytes: of its data files.
            record: returns what else the journal tells of the save; may wait until that is known.
        """
        self._steps.saved(step, save_id)
        self._gone(step, True)
        doomed = self._guarded(lambda: self._doom(step)) or []
        self.after(lambda: self._finish(step, nbytes, record, doomed))

    def failed(self, step: int) -> None:
        """A save has failed: what it has left is deleted after the next one."""
        with self._lock:
            self._litter.add(step)

    def after(self, action: Callable[[], None]) -> None:
        """Call a function in the background when everything before is deleted."""
        with self._lock:
            self._pending = [one for one in self._pending if not one.done()]
            self._pending.append(self._executor.submit(action))

    def make_room(self) -> None:
        """Before a save: wait for deletions. The first time, make up for what an earlier program did not finish."""
        self.wait()
        if not self._cleaned:
            self._cleaned = True
            self._guarded(self._first)

    def wait(self) -> None:
        """Wait until everything that was to be deleted is."""
        for one in list(self._pending):
            one.result()

    def close(self) -> None:
        """Wait for deletions under way, without pauses between attempts."""
        self._closed.set()
        self._executor.shutdown()

    def _first(self) -> None:
        """Delete what an earlier program has left, and what the policy of now does not want."""
        numbers = self._steps.numbers()
        # To look at all steps of a long run in an object store takes a while, and most of them are surely there.
        likely = self._journal.undeleted() if self._steps.root.remote else frozenset()
        self._clear_litter([step for step in numbers if step not in likely])
        if rest := sorted(likely.intersection(numbers)):
            self.after(lambda: self._guarded(lambda: self._clear_litter(rest)))
        newest = None if self._keeps_all() else self._steps.latest(numbers)
        if newest is None:
            return
        self._delete_all(self._doom(newest))

    def _clear_litter(self, numbers: Sequence[int]) -> None:
        for step, found in self._steps.looks(numbers).items():
            if found.kind == "unfinished" and step not in self._busy() and self._steps.remove_litter(step):
                self._journal.write("removed leftovers", step=step, reason="no commit was there")

    def _keeps_all(self) -> bool:
        policies = self._keep.policies if isinstance(self._keep, AnyOf) else (self._keep,)
        return any(isinstance(one, All) for one in policies)

    def _doom(self, step: int) -> list[_Doomed]:
        """Delete the commits of steps that no policy wants and that are older than a committed one.

        Nothing is asked of the storage while nothing is to be deleted, as far as this program knows.
        """
        if self._keeps_all():
            return []
        verdicts = self._verdicts(dict.fromkeys(self._steps.believed()))
        self._name_spared(verdicts)
        if not self._superfluous(verdicts, step):
            return []
        try:
            flaw: str | None = self._steps.flaw(step, thorough=True)
        except FileNotFoundError:
            flaw = "its commit is not there"
        if flaw is not None:
            logger.error("nothing is deleted, because step %s cannot be read back: %s", step, flaw)
            return []
        doomed = []
        for verdict in self._superfluous(self._proven(step), step):
            stock = self._steps.look(verdict.step).save_id is None
            doomed.append(_Doomed(verdict.step, verdict.reason, self._steps.facts(verdict.step), stock))
        retired = []
        for one in doomed:
            retired.append(self._retired(one))
            # The save waits for this, and a store that refuses several deletions will refuse the others too.
            if sum(not one.is_retired for one in retired) == _REFUSALS and len(retired) < len(doomed):
                logger.warning("%s more steps are to be deleted after the next save", len(doomed) - len(retired))
                break
        with self._lock:
            self._retired_steps.update(one.step for one in retired if one.is_retired)
            steps = frozenset(self._retired_steps)
        self._tell(steps)
        return retired

    def _name_spared(self, verdicts: Sequence[Verdict]) -> None:
        """Log, once, the steps that no policy wants and that stay because no manager wrote them."""
        spared = [one.step for one in verdicts if one.reason == _NOT_OURS and one.step not in self._spared]
        if spared:
            self._spared.update(spared)
            logger.warning(
                "no policy wants the steps %s of %s, and they stay: no CheckpointManager wrote them, so they are never "
                "deleted. If you do not need them, delete their folders yourself",
                *(", ".join(map(str, spared)), self._steps.location),
            )

    def _superfluous(self, verdicts: Sequence[Verdict], than: int) -> list[Verdict]:
        """Steps to delete: only what is older than one that has just been seen whole."""
        busy = self._busy()
        return [one for one in verdicts if not one.kept and one.step < than and one.step not in busy]

    def _proven(self, committed: int) -> tuple[Verdict, ...]:
        """The verdicts, after enough steps have been looked at to show that no damaged step takes the place of another.

        A kept step is looked at only if the verdicts would be others without it.
        """
        steps = self._steps.committed()
        flaws: dict[int, str | None] = dict.fromkeys([*steps, *self._steps.damaged])
        seen = {committed}
        count = _FIRST_LOOK
        while True:
            verdicts = self._verdicts(flaws)
            doomed = [one.step for one in self._superfluous(verdicts, committed)]
            unseen = [one.step for one in verdicts if one.kept and one.step not in seen and flaws[one.step] is None]
            without = {step: flaw for step, flaw in flaws.items() if step not in unseen}
            spared = {one.step for one in self._verdicts(without) if one.kept}
            look = [step for step in doomed if step not in seen]
            if not spared.isdisjoint(doomed):
                look += unseen[-count:]
                count *= 2
            if not look:
                return verdicts
            seen.update(look)
            flaws.update(zip(look, self._steps.each(self._flaw, look)))
            flaws = {step: flaw for step, flaw in flaws.items() if flaw != _GONE}

    def _flaw(self, step: int) -> str | None:
        """Why a step counts for no policy; ``_GONE`` if there is no such step any more."""
        try:
            return self._steps.flaw(step)
        except FileNotFoundError:
            return _GONE
        except CheckpointError as error:
            return str(error)

    def _verdicts(self, flaws: Mapping[int, str | None]) -> tuple[Verdict, ...]:
        """What becomes of steps.

        Args:
            flaws: the steps, with what is wrong with them; None for those that count.
        """
        damaged = {**self._steps.damaged, **{step: flaw for step, flaw in flaws.items() if flaw is not None}}
        sound = sorted(step for step in flaws if step not in damaged)
        saved = self._saved(sound)
        wanted = self._keep.wanted(saved, now())
        newest = sound[-1] if sound else None
        unwanted = [step for step in sound if step not in wanted and step != newest]
        if unwanted:  # what others wrote must not push out what was saved last
            latest = next((step for step in reversed(sound) if self._is_ours(step)), None)
            unwanted = [step for step in unwanted if step != latest]
        not_ours = {step for step, ours in zip(unwanted, self._steps.each(self._is_ours, unwanted)) if not ours}
        verdicts = []
        for step in sorted(flaws):
            if step in damaged:
                verdicts.append(Verdict(step, True, f"it is damaged, and left for you to look at ({damaged[step]})"))
            elif step in wanted:
                verdicts.append(Verdict(step, True, wanted[step]))
            elif step == newest:
                verdicts.append(Verdict(step, True, "the newest that can be restored"))
            elif step in not_ours:
                verdicts.append(Verdict(step, True, _NOT_OURS))
            elif step not in unwanted:
                verdicts.append(Verdict(step, True, "the newest that a CheckpointManager wrote"))
            else:
                verdicts.append(Verdict(step, False, f"no policy wants it, and step {newest} is newer"))
        return tuple(verdicts)

    def _saved(self, steps: Sequence[int]) -> list[Saved]:
        """What a policy is told of steps, ascending."""
        if not self._keep.needs_facts:
            return [Saved(step) for step in steps]
        return [one for one in self._steps.each(self._known, steps) if one is not None]

    def _known(self, step: int) -> Saved | None:
        try:
            return self._steps.facts(step).saved
        except (FileNotFoundError, CheckpointError):  # no step is deleted before ``_flaw`` has said what is wrong
            return None

    def _is_ours(self, step: int) -> bool:
        """Whether a manager wrote a step, as far as that can be told now. The manifest is read once."""
        try:
            return self._steps.facts(step).by_manager
        except (FileNotFoundError, CheckpointError):  # no step is deleted before ``_flaw`` has said what is wrong
            return True

    def _finish(
        self, committed: int, nbytes: int, record: Callable[[], Mapping[str, Any]], doomed: Sequence[_Doomed]
    ) -> None:
        """Tell the journal of a save, and delete the files of what it has made superfluous."""
        self._guarded(lambda: self._journal.write("saved", step=committed, nbytes=nbytes, **record()))
        with self._lock:
            undone, self._undone = self._undone, []
            litter, self._litter = self._litter, set()
        self._guarded(lambda: self._clear_litter(sorted(litter - {committed})))
        self._guarded(lambda: self._delete_all([*undone, *doomed]))

    def _delete_all(self, doomed: Sequence[_Doomed]) -> None:
        """Delete steps. Once one cannot be deleted, the others are tried once only: the next save waits for this."""
        attempts = _ATTEMPTS
        for one in doomed:
            if not self._delete(one, attempts):
                attempts = 1

    def _retired(self, doomed: _Doomed) -> _Doomed:
        """First attempt to delete the commit of a step."""
        try:
            self._steps.retire(doomed.step)
        except Exception as error:
            self._warn(doomed.step, 1, error)
            return doomed
        return replace(doomed, is_retired=True)

    def _delete(self, doomed: _Doomed, attempts: int) -> bool:
        """Delete a step: what is left of its commit, then its files."""
        step = doomed.step
        failure: Exception | None = None
        for attempt in range(1 if doomed.is_retired else 2, attempts + 1):
            if attempt > 1:
                self._closed.wait(_PAUSE * (attempt - 1))
            try:
                if not doomed.is_retired:
                    self._steps.retire(step)
                    doomed = replace(doomed, is_retired=True)
                is_gone = self._steps.clear(step, doomed.facts.files, stock=doomed.stock)
            except Exception as error:
                failure = error
                self._warn(step, attempt, error)
            else:
                self._gone(step, is_gone)
                self._journal.write("deleted", step=step, reason=doomed.reason, nbytes=doomed.facts.nbytes)
                return True
        reason = "its commit could not be deleted" if failure is None else str(failure)
        self._journal.write("failed to delete", step=step, reason=reason)
        if doomed.is_retired:  # otherwise it is a step as before, and the policy is asked again
            with self._lock:
                self._undone.append(doomed)
        return False

    def _gone(self, step: int, folder_is_gone: bool) -> None:
        """A step needs no longer be told of: its folder is gone, or it was saved again."""
        with self._lock:
            changed = folder_is_gone == (step in self._retired_steps)
            (self._retired_steps.discard if folder_is_gone else self._retired_steps.add)(step)
            steps = frozenset(self._retired_steps)
        if changed:
            self._tell(steps)

    def _warn(self, step: int, attempt: int, error: Exception) -> None:
        logger.warning(
            "step %s could not be deleted (attempt %s of %s): %s: %s",
            *(step, attempt, _ATTEMPTS, type(error).__name__, error),
        )

    def _guarded(self, action: Callable[[], Any]) -> Any:
        """Call a function whose failure must not make a save fail, which is committed."""
        try:
            return action()
        except Exception as error:
            logger.error(
                "deleting old steps failed, and goes on after the next save: %s: %s", type(error).__name__, error
            )
            return None


_GONE = "it is gone"
_NOT_OURS = "no policy wants it, but no CheckpointManager wrote it, so it is yours to delete"

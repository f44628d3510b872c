"""Retention: deletes steps that a manager wrote and that no policy wants, and nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch_xla_ckpt.manager.deletion import StepDeletion
from torch_xla_ckpt.manager.facts import Facts
from torch_xla_ckpt.manager.journal import Journal
from torch_xla_ckpt.manager.keep import Keep
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.manager.verdicts import Verdict, Verdicts

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_PAUSE = 0.5  # seconds before the second attempt; longer before later ones
_MOST_REFUSALS = 3  # steps that cannot be deleted; after these, the save no longer waits for others


@dataclass(frozen=True)
class _Deletion:
    """The deletion of a step.

    Args:
        step: the step's number.
        reason: why the step is deleted.
        facts: what the step's manifest says, with its files.
        stock: True if stock DCP wrote the step's files.
        is_retired: True if the step's commit is deleted already.
    """

    step: int
    reason: str
    facts: Facts
    stock: bool
    is_retired: bool = False


class Retention:
    """Deletes the steps that a policy does not want. Commits are deleted at once; the files follow in a thread.

    Args:
        steps: the run's steps.
        keep: the policy.
        journal: the journal, for a line about each deletion.
        saving: returns the steps that are being saved now.
        publish: called with all deleted steps whose folders are still there, whenever they change.
    """

    def __init__(
        self,
        steps: Steps,
        keep: Keep,
        journal: Journal,
        saving: Callable[[], set[int]],
        publish: Callable[[frozenset[int]], object] = bool,
    ):
        self._steps = steps
        self._journal = journal
        self._saving = saving
        self._publish = publish
        self._verdicts = Verdicts(steps, keep, saving)
        self._deletion = StepDeletion(steps)
        self._closed = threading.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="CheckpointManager")
        self._pending: list[Future[None]] = []
        self._is_cleaned = False
        self._lock = threading.Lock()
        # The lock guards these three.
        self._retired: set[int] = set()  # deleted steps whose folders are still there
        self._unfinished: list[_Deletion] = []  # the commit is deleted, and the files could not be
        self._failed: set[int] = set()  # steps whose save has failed since the last commit

    def after_commit(self, step: int, save_id: str, nbytes: int, timing: Callable[[], Mapping[str, Any]]) -> None:
        """Delete the commits of the steps that a new step makes superfluous. A thread deletes their files.

        Args:
            step: the step that has just been committed.
            save_id: the id of the save.
            nbytes: size of the step's data files in bytes.
            timing: returns the other fields of the save's line in the journal. May wait until they are known.
        """
        self._steps.saved(step, save_id)
        self._mark(step, is_retired=False)
        deletions = self._or_log(lambda: self._retire_superfluous(step)) or []
        self.in_thread(lambda: self._finish(step, nbytes, timing, deletions))

    def after_failure(self, step: int) -> None:
        """Remember that a save has failed. Its files are deleted after the next commit."""
        with self._lock:
            self._failed.add(step)

    def in_thread(self, action: Callable[[], None]) -> None:
        """Call a function in the thread that deletes files, after the deletions that are under way."""
        with self._lock:
            self._pending = [one for one in self._pending if not one.done()]
            self._pending.append(self._executor.submit(action))

    def before_save(self) -> None:
        """Wait for the previous saves' deletions, so that the disk holds at most one save more than the policy keeps.

        The first call also deletes what an earlier program has left.
        """
        self._or_log(self.wait)
        if not self._is_cleaned:
            self._is_cleaned = True
            self._or_log(self._clean_up)

    def wait(self) -> None:
        """Wait until all deletions have ended."""
        for one in list(self._pending):
            one.result()

    def close(self) -> None:
        """Wait for the deletions under way, without pauses between attempts."""
        self._closed.set()
        self._executor.shutdown()

    # Leftovers

    def _clean_up(self) -> None:
        """Delete what an earlier program has left, and what today's policy does not want."""
        numbers = self._steps.numbers()
        # Looking at all steps of a long run in an object store takes long, and the journal knows most of them.
        likely = self._journal.undeleted() if self._steps.root.remote else frozenset()
        self._remove_leftovers([step for step in numbers if step not in likely])
        if rest := sorted(likely.intersection(numbers)):
            self.in_thread(lambda: self._or_log(lambda: self._remove_leftovers(rest)))
        self.delete_superfluous(numbers)

    def delete_superfluous(self, numbers: Sequence[int] | None = None) -> None:
        """Delete the steps that the policy does not want, and that are older than the newest step that is whole.

        Args:
            numbers: the numbers of the run's folders. Default: list them.
        """
        newest = None if self._verdicts.keep_all else self._steps.latest(numbers)
        if newest is not None:
            self._delete_all(self._retire_superfluous(newest))

    def delete(self, verdicts: Sequence[Verdict], newest: int) -> None:
        """Delete the steps that verdicts do not keep.

        Args:
            verdicts: the verdicts on all steps of the run.
            newest: the newest step that is whole. If it cannot be read back now, nothing is deleted.
        """
        if self._can_be_read_back(newest):
            self._delete_all(self._retire_all([one for one in verdicts if not one.kept]))

    def _remove_leftovers(self, numbers: Sequence[int]) -> None:
        for step, folder in self._steps.looks(numbers).items():
            if folder.kind == "unfinished" and step not in self._saving() and self._deletion.remove_leftovers(step):
                self._journal.write("removed leftovers", step=step, reason="no commit was there")

    # Commits

    def _retire_superfluous(self, newest: int) -> list[_Deletion]:
        """Delete the commits of steps that no policy wants and that are older than a committed one.

        Makes no request while nothing is to be deleted, as far as this program knows.
        """
        if self._verdicts.keep_all or not self._verdicts.likely(newest):
            return []
        return self._retire_all(self._verdicts.proven(newest)) if self._can_be_read_back(newest) else []

    def _can_be_read_back(self, newest: int) -> bool:
        """Return whether a step is whole, as far as its manifest and files show now. If not, log why."""
        try:
            flaw: str | None = self._steps.flaw(newest, thorough=True)
        except FileNotFoundError:
            flaw = "its commit is not there"
        if flaw is not None:
            logger.error("no step is deleted, because step %s cannot be read back: %s", newest, flaw)
        return flaw is None

    def _retire_all(self, verdicts: Sequence[Verdict]) -> list[_Deletion]:
        """Delete the commits of these steps. Steps that another program has deleted meanwhile are left out."""
        deletions = []
        for verdict in verdicts:
            with suppress(FileNotFoundError):
                stock = self._steps.look(verdict.step).save_id is None
                deletions.append(_Deletion(verdict.step, verdict.reason, self._steps.facts(verdict.step), stock))
        tried = []
        for one in deletions:
            tried.append(self._retire(one))
            # The save waits for this, and a store that refuses several deletions will refuse the others too.
            if sum(not one.is_retired for one in tried) == _MOST_REFUSALS and len(tried) < len(deletions):
                logger.warning("%s more steps will be deleted after the next save", len(deletions) - len(tried))
                break
        with self._lock:
            self._retired.update(one.step for one in tried if one.is_retired)
            retired = frozenset(self._retired)
        self._publish(retired)
        return tried

    def _retire(self, deletion: _Deletion) -> _Deletion:
        """Make the first attempt to delete the commit of a step."""
        try:
            self._deletion.retire(deletion.step)
        except Exception as error:
            self._warn(deletion.step, 1, error)
            return deletion
        return replace(deletion, is_retired=True)

    # Files

    def _finish(
        self, step: int, nbytes: int, timing: Callable[[], Mapping[str, Any]], deletions: Sequence[_Deletion]
    ) -> None:
        """Write a save into the journal, and delete the files of the steps that it made superfluous."""
        self._or_log(lambda: self._journal.write("saved", step=step, nbytes=nbytes, **timing()))
        with self._lock:
            unfinished, self._unfinished = self._unfinished, []
            failed, self._failed = self._failed, set()
        self._or_log(lambda: self._remove_leftovers(sorted(failed - {step})))
        self._or_log(lambda: self._delete_all([*unfinished, *deletions]))

    def _delete_all(self, deletions: Sequence[_Deletion]) -> None:
        """Delete steps. After one that cannot be deleted, try the others only once: the next save waits for this."""
        attempts = _ATTEMPTS
        for one in deletions:
            if not self._delete(one, attempts):
                attempts = 1

    def _delete(self, deletion: _Deletion, attempts: int) -> bool:
        """Delete a step: its commit if it is still there, then its files. Return whether that worked."""
        step = deletion.step
        failure: Exception | None = None
        for attempt in range(1 if deletion.is_retired else 2, attempts + 1):
            if attempt > 1:
                self._closed.wait(_PAUSE * (attempt - 1))
            try:
                if not deletion.is_retired:
                    self._deletion.retire(step)
                    deletion = replace(deletion, is_retired=True)
                is_gone = self._deletion.clear(step, deletion.facts.files, stock=deletion.stock)
            except Exception as error:
                failure = error
                self._warn(step, attempt, error)
            else:
                self._mark(step, is_retired=not is_gone)
                self._journal.write("deleted", step=step, reason=deletion.reason, nbytes=deletion.facts.nbytes)
                return True
        reason = "its commit could not be deleted" if failure is None else str(failure)
        self._journal.write("failed to delete", step=step, reason=reason)
        if deletion.is_retired:  # otherwise the step is still there, and the policy is asked again
            with self._lock:
                self._unfinished.append(deletion)
        return False

    def _mark(self, step: int, *, is_retired: bool) -> None:
        """Publish whether a step is deleted while its folder is still there."""
        with self._lock:
            changed = is_retired != (step in self._retired)
            if is_retired:
                self._retired.add(step)
            else:
                self._retired.discard(step)
            retired = frozenset(self._retired)
        if changed:
            self._publish(retired)

    def _warn(self, step: int, attempt: int, error: Exception) -> None:
        kind = type(error).__name__
        logger.warning("step %s could not be deleted (attempt %s of %s): %s: %s", step, attempt, _ATTEMPTS, kind, error)

    def _or_log(self, action: Callable[[], Any]) -> Any:
        """Call a function. Log its failure: the save is committed, and must not fail because of a deletion."""
        try:
            return action()
        except Exception as error:
            kind = type(error).__name__
            logger.error("deleting old steps failed, and is tried again after the next save: %s: %s", kind, error)
            return None

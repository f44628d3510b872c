"""Deleting steps that no policy wants, and nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch_xla_ckpt.manager.journal import Journal
from torch_xla_ckpt.manager.keep import Keep, Saved, now
from torch_xla_ckpt.manager.steps import Look, Steps

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_PAUSE = 0.5  # seconds before another attempt


@dataclass(frozen=True)
class Verdict:
    """What becomes of a step.

    Args:
        step: its number.
        kept: or deleted.
        reason: why.
    """

    step: int
    kept: bool
    reason: str


class Retention:
    """Keeps what a policy wants, in a thread of its own.

    Args:
        steps: where.
        keep: the policy.
        journal: to record deletions in.
        busy: the steps that are being saved now.
    """

    def __init__(self, steps: Steps, keep: Keep, journal: Journal, busy: Callable[[], set[int]]):
        self._steps = steps
        self._keep = keep
        self._journal = journal
        self._busy = busy
        self._closed = threading.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="CheckpointManager")
        self._pending: list[Future[None]] = []
        self._cleaned = False

    def plan(self) -> tuple[Verdict, ...]:
        """What would be deleted now, and why; deletes nothing."""
        return tuple(verdict for verdict, _ in self._plan(self._steps.committed()))

    def committed(self, step: int, facts: Callable[[], Mapping[str, Any]]) -> None:
        """A step has been committed: read it back and delete what it makes superfluous, in the background.

        Args:
            step: its number.
            facts: what the journal is to tell of the save; may wait until they are known.
        """
        self._pending = [one for one in self._pending if not one.done()]
        self._pending.append(self._executor.submit(self._retire, step, facts))

    def make_room(self) -> None:
        """Before a save: wait for deletions. The first time, do what an earlier program was to do and has not."""
        self.wait()
        if not self._cleaned:
            self._cleaned = True
            newest = max(self._steps.committed(), default=None)
            if newest is None:
                self.remove_litter()
            else:
                self._sweep(newest, lambda nbytes: None)

    def wait(self) -> None:
        """Wait until nothing is being deleted."""
        for one in list(self._pending):
            one.result()

    def close(self) -> None:
        """Wait for what is being deleted; what failed is not tried again."""
        self._closed.set()
        self._executor.shutdown()

    def remove_litter(self) -> None:
        """Delete what saves and deletions that broke off have left."""
        for step, look in self._steps.all().items():
            if step not in self._busy():
                try:
                    removed = self._steps.remove_litter(step, look)
                except OSError as error:
                    logger.warning("leftovers in %s could not be removed: %s", self._steps.at(step), error)
                else:
                    if removed:
                        self._journal.write("removed leftovers", step=step, reason="no commit was there")

    def _plan(self, looks: dict[int, Look]) -> list[tuple[Verdict, Look]]:
        flaws = {step: self._steps.flaw(step, look) for step, look in looks.items()}
        whole: Sequence[Saved] = [self._steps.saved(step, looks[step]) for step, flaw in flaws.items() if flaw is None]
        wanted = self._keep.wanted(whole, now())
        newest = whole[-1].step if whole else None
        verdicts = []
        for step, look in looks.items():
            flaw = flaws[step]
            if flaw is not None:
                verdict = Verdict(step, True, f"it is damaged, and left for you to look at ({flaw})")
            elif step in wanted:
                verdict = Verdict(step, True, wanted[step])
            elif step == newest:
                verdict = Verdict(step, True, "the newest that can be restored")
            else:
                verdict = Verdict(step, False, f"no policy wants it, and step {newest} is newer")
            verdicts.append((verdict, look))
        return verdicts

    def _retire(self, committed: int, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._sweep(committed, lambda nbytes: self._journal.write("saved", step=committed, nbytes=nbytes, **facts()))

    def _sweep(self, committed: int, whole: Callable[[int], object]) -> None:
        """Delete leftovers, and what no policy wants and is older than a committed step that can be read back.

        Args:
            committed: that step.
            whole: called with its bytes once it has been read back.
        """
        try:
            self.remove_litter()
            looks = self._steps.committed()
            flaw: str | None = "its commit is not there"
            if committed in looks:
                flaw = self._steps.flaw(committed, looks[committed], thorough=True)
            if flaw is not None:
                logger.error("nothing is deleted, because step %s cannot be read back: %s", committed, flaw)
                return
            whole(self._steps.nbytes(committed, looks[committed]))
            for verdict, look in self._plan(looks):
                # Only what is older than something that has just been seen whole.
                if not verdict.kept and verdict.step < committed and verdict.step not in self._busy():
                    self._delete(verdict, look)
        except Exception as error:  # nobody waits for this thread
            logger.error(
                "deleting old steps failed, and goes on after the next save: %s: %s", type(error).__name__, error
            )

    def _delete(self, verdict: Verdict, look: Look) -> None:
        nbytes = self._steps.nbytes(verdict.step, look)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._steps.remove(verdict.step, look)
            except OSError as error:
                logger.warning(
                    *("step %s could not be deleted (attempt %s of %s): %s", verdict.step, attempt, _ATTEMPTS, error)
                )
                if attempt == _ATTEMPTS:
                    self._journal.write("failed to delete", step=verdict.step, reason=str(error))
                    return
                self._closed.wait(_PAUSE * attempt)
            else:
                self._journal.write("deleted", step=verdict.step, reason=verdict.reason, nbytes=nbytes)
                return

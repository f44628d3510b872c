"""The search for the newest step that can be restored, while another program may delete steps."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MismatchError,
    UnsafeObjectError,
)
from torch_xla_ckpt.manager.step_folder import StepFolder
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.manager.uncommitted import lost_commit

logger = logging.getLogger(__name__)

_ROUNDS = 100  # steps that may be deleted while they are restored, one after another


@dataclass(frozen=True)
class _Search:
    """What one look at the steps has found, from the newest to the first that is whole.

    Args:
        numbers: the numbers of all folders.
        unfinished: folders without a commit, from the newest.
        skipped: descriptions of the damage of the damaged steps.
        step: the newest whole step; None if there is none.
        folder: the kind of that step's folder; None if there is no such step.
    """

    numbers: tuple[int, ...]
    unfinished: tuple[int, ...]
    skipped: Mapping[int, str]
    step: int | None = None
    folder: StepFolder | None = None


class NewestStep:
    """The search for the newest step of a run that can be restored.

    Args:
        steps: the run's steps.
        processes: the ranks that restore together.
    """

    def __init__(self, steps: Steps, processes: Processes):
        self._steps = steps
        self._processes = processes
        self._skipped: dict[int, str] = {}
        self._unfinished: tuple[int, ...] = ()

    def restore(self, load: Callable[[int], None]) -> int | None:
        """Load the newest step that can be loaded. Skip damaged steps with a warning, and forget deleted steps.

        Args:
            load: restores a step; called on all ranks.

        Returns:
            The step that was loaded; None if there is none.

        Raises:
            CheckpointError: the storage does not answer, or ``load`` failed and the step is not damaged.
        """
        doing = f"looking for the newest step of {self._steps.location}"
        for _ in range(_ROUNDS):
            result = self._processes.from_first(self._search, doing)
            self._skipped, self._unfinished = dict(result.skipped), result.unfinished
            step = result.step
            if step is None:
                return None
            try:
                load(step)
            except (MismatchError, UnsafeObjectError):
                raise
            except CheckpointError as error:
                if self._processes.from_first(functools.partial(self._is_unchanged, step, result.folder), doing):
                    if not isinstance(error, (CorruptCheckpointError, IncompleteCheckpointError)):
                        raise
                    self._skipped[step] = str(error)
                else:
                    logger.info("step %s was deleted or replaced while it was restored; looking for another", step)
                continue
            self._report_skipped()
            return step
        raise CheckpointError(
            f"another program deletes the steps of {self._steps.location} faster than they can be restored ({_ROUNDS} "
            "attempts). Let the program that saves the steps keep more of them"
        )

    def require_none(self) -> None:
        """Check that there was nothing to restore.

        Raises:
            CheckpointError: there are steps, but all of them are damaged.
        """
        if self._skipped:
            raise CheckpointError(
                f"{self._steps.location} has steps, but none of them can be restored:\n  "
                + "\n  ".join(f"{step}: {why}" for step, why in self._skipped.items())
                + "\nTo start a new run, use another path"
            )
        if self._unfinished:
            logger.warning(
                "%s has no committed step. Saves or deletions that were not finished have left the folders: %s",
                self._steps.location,
                ", ".join(map(str, self._unfinished)),
            )

    def _search(self) -> _Search:
        """Look for the newest step; look again if another program has deleted steps meanwhile."""
        before: _Search | None = None
        for _ in range(_ROUNDS):
            found = self._search_once()
            if not found.unfinished or found == before:
                break
            before = found
        lost = {step: flaw for step in found.unfinished if (flaw := lost_commit(self._steps, step)) is not None}
        unfinished = tuple(step for step in found.unfinished if step not in lost)
        return replace(found, unfinished=unfinished, skipped={**lost, **found.skipped})

    def _search_once(self) -> _Search:
        numbers = self._steps.numbers()
        skipped: dict[int, str] = {}
        unfinished: list[int] = []
        for step in reversed(numbers):
            if step in self._skipped:
                skipped[step] = self._skipped[step]
                continue
            folder = self._steps.look(step, fresh=True)
            if folder.kind == "foreign":
                continue
            try:
                flaw = self._steps.flaw(step, thorough=True)
            except FileNotFoundError:
                unfinished.append(step)
                continue
            if flaw is None:
                return _Search(tuple(numbers), tuple(unfinished), skipped, step, folder)
            skipped[step] = flaw
        return _Search(tuple(numbers), tuple(unfinished), skipped)

    def _is_unchanged(self, step: int, folder: StepFolder | None) -> bool:
        """Return whether a step's folder still holds the same commit."""
        return self._steps.look(step, fresh=True) == folder

    def _report_skipped(self) -> None:
        for step, flaw in self._skipped.items():
            self._steps.found_damaged(step, flaw)
            logger.warning("step %s of %s is skipped, because it is damaged: %s", step, self._steps.location, flaw)

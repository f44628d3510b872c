"""Restoring the newest step that is whole, beside a program that may delete steps meanwhile."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MismatchError,
    UnsafeObjectError,
)
from torch_xla_ckpt.manager.journal import Journal
from torch_xla_ckpt.manager.steps import Found, Steps
from torch_xla_ckpt.storage import Location

logger = logging.getLogger(__name__)

_ROUNDS = 100  # attempts to restore a step before it is deleted


@dataclass(frozen=True)
class _Pass:
    """What one look at all steps has found, from the newest to the first that is whole.

    Args:
        numbers: the folders there are.
        unfinished: those that hold no commit.
        skipped: damaged steps, with what is wrong.
        step: the newest that is whole; None if there is none.
        found: what it is.
    """

    numbers: tuple[int, ...]
    unfinished: tuple[int, ...]
    skipped: Mapping[int, str]
    step: int | None = None
    found: Found | None = None


class Newest:
    """The search for the newest step of a run that can be restored.

    Args:
        steps: of the run.
        processes: that restore together.
    """

    def __init__(self, steps: Steps, processes: Processes):
        self._steps = steps
        self._processes = processes
        self._skipped: dict[int, str] = {}
        self._leftovers: tuple[int, ...] = ()

    def restore(self, load: Callable[[int], None]) -> int | None:
        """Load the newest step that can be. A step that is damaged is skipped, one that was deleted is forgotten.

        Args:
            load: restores a step; called on all ranks.

        Returns:
            The step; None if there is none.

        Raises:
            CheckpointError: the storage does not answer; or what ``load`` fails with, unless the step is damaged.
        """
        doing = f"looking for the newest step of {self._steps.location}"
        for _ in range(_ROUNDS):
            result = self._processes.from_first(self._search, doing)
            self._skipped, self._leftovers = dict(result.skipped), result.unfinished
            step = result.step
            if step is None:
                return None
            try:
                load(step)
            except (MismatchError, UnsafeObjectError):
                raise
            except CheckpointError as error:
                if self._processes.from_first(functools.partial(self._is_still, step, result.found), doing):
                    if not isinstance(error, (CorruptCheckpointError, IncompleteCheckpointError)):
                        raise
                    self._skipped[step] = str(error)
                else:
                    logger.info("step %s was deleted or replaced while it was being restored; looking again", step)
                continue
            self._report()
            return step
        raise CheckpointError(
            f"the steps of {self._steps.location} are deleted faster than they can be restored ({_ROUNDS} were). Let "
            "the program that saves them keep more"
        )

    def require_none(self) -> None:
        """Show that there was nothing to restore.

        Raises:
            CheckpointError: there are steps, and all of them are damaged.
        """
        if self._skipped:
            raise CheckpointError(
                f"{self._steps.location} has steps, and none of them can be restored:\n  "
                + "\n  ".join(f"{step}: {why}" for step, why in self._skipped.items())
                + "\nTo begin anew, use another path"
            )
        if self._leftovers:
            logger.warning(
                "%s has no committed step. Left by saves or deletions that were not finished: %s",
                *(self._steps.location, ", ".join(map(str, self._leftovers))),
            )

    def _search(self) -> _Pass:
        """Look for the newest step, again if the run changes meanwhile: a program that saves deletes older steps."""
        before: _Pass | None = None
        for _ in range(_ROUNDS):
            found = self._pass()
            if not found.unfinished or found == before:
                return found
            before = found
        return found

    def _pass(self) -> _Pass:
        numbers = self._steps.numbers()
        skipped: dict[int, str] = {}
        unfinished: list[int] = []
        for step in reversed(numbers):
            if step in self._skipped:
                skipped[step] = self._skipped[step]
                continue
            found = self._steps.look(step, fresh=True)
            if found.kind == "foreign":
                continue
            try:
                flaw = self._steps.flaw(step, thorough=True)
            except FileNotFoundError:
                unfinished.append(step)
                continue
            if flaw is None:
                return _Pass(tuple(numbers), tuple(unfinished), skipped, step, found)
            skipped[step] = flaw
        return _Pass(tuple(numbers), tuple(unfinished), skipped)

    def _is_still(self, step: int, found: Found | None) -> bool:
        return self._steps.look(step, fresh=True) == found

    def _report(self) -> None:
        for step, why in self._skipped.items():
            self._steps.found_damaged(step, why)
            logger.warning("step %s of %s is skipped, because it is damaged: %s", step, self._steps.location, why)


@dataclass(frozen=True)
class Origin:
    """What ``initial_path`` leads to.

    Args:
        location: of a run, or of a checkpoint.
        is_run: whether it is a run.
    """

    location: Location
    is_run: bool


def origin_of(path: Location, storage_options: Mapping[str, Any] | None) -> Origin:
    """Find the run or the checkpoint that another run is to begin with.

    A run that has no step of its own, and began with yet another one, leads there.

    Raises:
        CheckpointError: there is neither.
    """
    seen: list[Location] = []
    while True:
        seen.append(path)
        steps = Steps(path)
        if any(found.kind in ("committed", "damaged") for found in steps.looks(steps.numbers()).values()):
            return Origin(path, True)
        if steps.tried(lambda steps=steps: ".metadata" in steps.root.names(), "looking for a checkpoint"):  # type: ignore[misc]
            return Origin(path, False)
        began = [event.get("source") for event in Journal(steps).events() if event.get("event") == "began"]
        if not began or not isinstance(began[-1], str):
            break
        path = Location.of(began[-1], None if path.is_local else storage_options)
        if path in seen:
            break
    raise CheckpointError(
        f"initial_path={seen[0]} holds neither a step of a run nor a checkpoint"
        + ("" if len(seen) == 1 else f", nor does {seen[-1]}, which it leads to")
    )

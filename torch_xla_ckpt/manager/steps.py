"""The steps of a run: which there are, and whether they can be restored."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError, UnsafeObjectError
from torch_xla_ckpt.manager.facts import Facts
from torch_xla_ckpt.manager.memory import Memory
from torch_xla_ckpt.manager.retries import Retries
from torch_xla_ckpt.manager.step_folder import StepFolder, StepReader
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.storage import Location, open_folder

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"0|[1-9][0-9]*")
_THREADS = 16  # requests at a time, on remote stores

T = TypeVar("T")


class Steps:
    """The steps below a path.

    ``saved`` and ``found_damaged`` take note of what this program did itself.

    Args:
        location: the run's folder.
        deleted: returns the steps that another rank has deleted.
        closed: an event that ends the pauses between attempts to reach the storage.
    """

    def __init__(
        self,
        location: Location,
        deleted: Callable[[], Iterable[int]] = tuple,
        closed: threading.Event | None = None,
    ):
        self.location = location
        self.retries = Retries(location, closed or threading.Event())
        self._deleted = deleted
        self._reader = StepReader(location, self.retries)
        self._memory = Memory()

    @property
    def root(self) -> Folder:
        """The run's folder itself."""
        return open_folder(self.location, sync=False)

    @property
    def damaged(self) -> Mapping[int, str]:
        """The steps that were found to be damaged, with a description of the damage."""
        return self._memory.damaged()

    def at(self, step: int) -> Location:
        """Location of a step's folder."""
        return self._reader.at(step)

    def folder(self, step: int) -> Folder:
        """A step's folder, for reading and deleting."""
        return self._reader.folder(step)

    # Which steps there are

    def numbers(self) -> list[int]:
        """List the numbers of all folders that are named like a step, ascending, of any kind. One request."""
        deleted = set(self._deleted())
        own_before = self._memory.own_steps()
        names = self.retries.run(lambda: self.root.folders(), "listing the steps")
        return self._memory.listed({int(name) for name in names if _NUMBER.fullmatch(name)}, own_before, deleted)

    def believed(self) -> list[int]:
        """Return the steps from memory, or list them once. Misses what other programs have changed since."""
        believed = self._memory.believed()
        return self.numbers() if believed is None else believed

    def restorable(self) -> list[int]:
        """List the committed steps that are not known to be damaged, ascending.

        Takes one listing, and one or two requests for each folder that is not known yet. A warning names each foreign
        folder once.
        """
        looks = self.looks(self.numbers())
        damaged = self.damaged
        return [step for step, folder in looks.items() if folder.kind == "committed" and step not in damaged]

    def latest(self, numbers: Iterable[int] | None = None) -> int | None:
        """Return the newest committed step that is not known to be damaged.

        Args:
            numbers: the numbers of the run's folders. Default: list them.
        """
        for step in sorted(self.numbers() if numbers is None else numbers, reverse=True):
            if self.look(step, fresh=True).kind == "committed" and step not in self.damaged:
                return step
        return None

    def looks(self, numbers: Collection[int]) -> dict[int, StepFolder]:
        """Return the kind of each of these folders. Remote folders are looked at in parallel."""
        return dict(zip(numbers, self.each(self.look, numbers)))

    def look(self, step: int, *, fresh: bool = False) -> StepFolder:
        """Return the kind of a step's folder.

        Args:
            step: the step's number.
            fresh: ask the storage, even if the answer is remembered.
        """
        known = self._memory.get(step)
        try:
            stamp = self._reader.stamp(step)
        except FileNotFoundError:
            return self._note(step, StepFolder("unfinished"), None)
        if known is not None and (known.stamp == stamp if stamp is not None else not fresh):
            return known.folder
        return self._note(step, self._reader.look(step), stamp)

    def each(self, function: Callable[[int], T], numbers: Collection[int]) -> list[T]:
        """Call a function for each number; in threads where the storage is remote."""
        if not self.root.remote or len(numbers) < 2:
            return [function(number) for number in numbers]
        with ThreadPoolExecutor(min(_THREADS, len(numbers)), thread_name_prefix="CheckpointManager-look") as threads:
            return list(threads.map(function, numbers))

    # What a step holds

    def facts(self, step: int) -> Facts:
        """Return what the manifest of a committed step says. Each manifest is read once.

        Raises:
            FileNotFoundError: the step is not committed, or was deleted just now.
            CorruptCheckpointError, UnsafeObjectError: the step is damaged.
            CheckpointError: the storage does not answer.
        """
        folder = self.look(step)
        if folder.kind in ("unfinished", "foreign"):
            raise FileNotFoundError(f"{self.at(step)} holds no committed step")
        if folder.kind == "damaged":
            raise CorruptCheckpointError(folder.flaw or "")
        known = self._memory.get(step)
        if known is not None and known.facts is not None:
            return known.facts
        facts, save_id = self._reader.facts(step, folder)
        if save_id is not None and save_id != folder.save_id:  # somebody has saved the step again meanwhile
            self._note(step, StepFolder("committed", save_id), self._reader.stamp(step))
        self._memory.learned(step, facts=facts)
        return facts

    def flaw(self, step: int, *, thorough: bool = False) -> str | None:
        """Return why a committed step cannot be restored, as far as this shows without reading its data.

        Args:
            step: the step's number.
            thorough: look at the step's files again, even if all of them were there before.

        Returns:
            A description of the damage; None if the step looks whole.

        Raises:
            FileNotFoundError: the step is not committed, or was deleted just now.
            CheckpointError: the storage does not answer.
        """
        folder = self.look(step, fresh=thorough)
        known = self._memory.get(step)
        if known is not None and known.damage is not None:
            return known.damage
        if known is not None and known.is_whole and not thorough:
            return None
        try:
            missing = self._reader.missing(step, self.facts(step).files)
        except (CorruptCheckpointError, IncompleteCheckpointError, UnsafeObjectError) as error:
            flaw: str | None = str(error)
        else:
            flaw = f"{', '.join(missing[:3])} is missing or too short" if missing else None
        if flaw is not None and self.look(step, fresh=True) != folder:  # deleted or saved again meanwhile
            return self.flaw(step, thorough=thorough)
        self._memory.learned(step, is_whole=flaw is None, damage=flaw)
        return flaw

    # What this program did

    def saved(self, step: int, save_id: str | None = None) -> None:
        """Take note that this program has committed a step.

        Args:
            step: the step's number.
            save_id: the id of the save, where this process knows it.
        """
        self._memory.saved(step)
        if save_id is not None:
            with suppress(OSError, CheckpointError):
                self._note(step, StepFolder("committed", save_id), self._reader.stamp(step))
                self._memory.learned(step, is_whole=True)

    def found_damaged(self, step: int, flaw: str) -> None:
        """Take note that a step could not be restored, because its content is damaged."""
        with suppress(CheckpointError):
            self.look(step)
        self._memory.learned(step, damage=flaw)

    def forget(self, step: int) -> None:
        """Forget what was found in a step's folder, because this program has changed it."""
        self._memory.forget(step)

    def folder_removed(self, step: int) -> None:
        """Take note that this program has removed a step's folder."""
        self._memory.folder_removed(step)

    def _note(self, step: int, folder: StepFolder, stamp: object) -> StepFolder:
        if self._memory.looked(step, folder, stamp):
            logger.warning(
                "%s has a .metadata that is not a checkpoint's. The folder is not a step, and the manager ignores it",
                self.at(step),
            )
        return folder

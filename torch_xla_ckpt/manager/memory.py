"""What a manager remembers of a run's steps, so that it need not ask the storage again."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from torch_xla_ckpt.manager.facts import Facts
from torch_xla_ckpt.manager.step_folder import StepFolder
from torch_xla_ckpt.runtime import forks


@dataclass
class Known:
    """What is remembered of one step, as long as its folder has not changed.

    Args:
        folder: the kind of the step's folder.
        stamp: the value of ``StepReader.stamp`` at that time.
        facts: what the manifest says; None if it was not read yet.
        is_whole: whether all files were there when somebody looked.
        damage: a description of the damage; None if no damage was found.
    """

    folder: StepFolder
    stamp: object
    facts: Facts | None = None
    is_whole: bool = False
    damage: str | None = None


class Memory:
    """What is remembered of a run. Its size is bounded by the number of folders in the last listing.

    Attributes:
        known: what was found in each step's folder.
        own: steps that this program committed and nobody deleted since. A listing that lags may lack them.
        numbers: the numbers of the run's folders; None before the first listing.
        reported: folders whose ``.metadata`` belongs to no checkpoint, and that a warning has named.
    """

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}
        self.own: set[int] = set()
        self.numbers: set[int] | None = None
        self.reported: set[int] = set()
        self._renew()
        forks.renew_in_child(self, Memory._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def get(self, step: int) -> Known | None:
        with self._lock:
            return self.known.get(step)

    def own_steps(self) -> set[int]:
        """A copy of ``own``."""
        with self._lock:
            return set(self.own)

    def damaged(self) -> Mapping[int, str]:
        """Descriptions of the damage of all steps that were found to be damaged."""
        with self._lock:
            known = dict(self.known)
        flaws = {step: one.damage or one.folder.flaw for step, one in sorted(known.items())}
        return {step: flaw for step, flaw in flaws.items() if flaw is not None}

    def believed(self) -> list[int] | None:
        """Numbers of the folders that are steps as far as is known; None before the first listing."""
        with self._lock:
            if self.numbers is None:
                return None
            kinds = {step: one.folder.kind for step, one in self.known.items()}
            return sorted(step for step in self.numbers if kinds.get(step, "committed") == "committed")

    def listed(self, listed: set[int], own_before: set[int], deleted: set[int]) -> list[int]:
        """Take note of a listing, and return the numbers of the run's folders.

        Args:
            listed: the numbers in the listing.
            own_before: ``own_steps()`` before the listing was made.
            deleted: steps that another rank has deleted.
        """
        with self._lock:
            self.own -= deleted
            # Steps that were committed or deleted while the listing was made are as ``own`` has them.
            self.numbers = (listed - (own_before - self.own)) | self.own
            # Another program may have deleted what the listing lacks, so the manager has to look at it again.
            doubtful = deleted | (self.own - listed)
            self.known = {n: one for n, one in self.known.items() if n in self.numbers and n not in doubtful}
            self.reported &= self.numbers
            return sorted(self.numbers)

    def looked(self, step: int, folder: StepFolder, stamp: object) -> bool:
        """Take note of what a step's folder is.

        Returns:
            True if the folder is foreign and no warning has named it yet.
        """
        with self._lock:
            known = self.known.get(step)
            if folder.kind == "unfinished":
                self.known.pop(step, None)
                self.own.discard(step)
            elif known is None or known.folder != folder or known.stamp != stamp:
                self.known[step] = Known(folder, stamp)
            is_news = folder.kind == "foreign" and step not in self.reported
            if is_news:
                self.reported.add(step)
            return is_news

    def learned(
        self, step: int, *, facts: Facts | None = None, is_whole: bool | None = None, damage: str | None = None
    ) -> None:
        """Take note of what a step's manifest and files say, if its folder is known."""
        with self._lock:
            known = self.known.get(step)
            if known is not None:
                known.facts = facts or known.facts
                known.is_whole = known.is_whole if is_whole is None else is_whole
                known.damage = damage or known.damage

    def saved(self, step: int) -> None:
        """Take note that this program has committed a step."""
        with self._lock:
            self.own.add(step)
            self.known.pop(step, None)
            if self.numbers is not None:
                self.numbers.add(step)

    def forget(self, step: int) -> None:
        """Forget what was found in a step's folder."""
        with self._lock:
            self.known.pop(step, None)

    def folder_removed(self, step: int) -> None:
        """Take note that a step's folder is gone."""
        with self._lock:
            if self.numbers is not None:
                self.numbers.discard(step)

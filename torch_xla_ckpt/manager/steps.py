"""What lies in a run's folder: a folder for each step, named by its number."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager.keep import Saved
from torch_xla_ckpt.storage import commit
from torch_xla_ckpt.storage.files import Folder, open_folder
from torch_xla_ckpt.storage.location import Location

logger = logging.getLogger(__name__)

# Where a manifest's user metadata has what the manager was given.
KEY = "torch_xla_ckpt.manager"
# torch_xla's manager writes this last; it is a pickle, and never opened.
_THEIRS = ".manager_metadata"
_MANIFEST = re.compile(r"manifest-[0-9a-f]{16}\.json")
_NUMBER = re.compile(r"0|[1-9][0-9]*")

Kind = Literal["committed", "unfinished", "foreign"]


@dataclass(frozen=True)
class Look:
    """What the folder of a step is.

    Args:
        kind: "unfinished" has no commit: a save that goes on or broke off, or what is left of a deletion.
        names: of its files.
    """

    kind: Kind
    names: frozenset[str]


class Steps:
    """The steps below a path. Nothing is remembered but what cannot change: the content of manifests.

    Args:
        location: the run's folder.

    Attributes:
        damaged: steps that were found to be, with what is wrong; they do not count as committed ones.
    """

    def __init__(self, location: Location):
        self.location = location
        self._known: dict[tuple[int, Look], tuple[Saved, Mapping[str, int]]] = {}
        self._reported: set[int] = set()
        self.damaged: dict[int, str] = {}

    @property
    def root(self) -> Folder:
        """The run's folder itself."""
        return open_folder(self.location, sync=False)

    def folder(self, step: int) -> Folder:
        return open_folder(self.at(step), sync=False)

    def at(self, step: int) -> Location:
        """Where a step lies."""
        return self.location.child(str(step))

    def all(self) -> dict[int, Look]:
        """Every folder that is named like a step, ascending, whatever it is."""
        numbers = sorted(int(name) for name in self.root.folders() if _NUMBER.fullmatch(name))
        looks = {number: self._look(number) for number in numbers}
        # What has been deleted or replaced is not remembered: a run has many thousands of steps.
        self._known = {known: facts for known, facts in tuple(self._known.items()) if looks.get(known[0]) == known[1]}
        return looks

    def committed(self) -> dict[int, Look]:
        """The steps whose commit is there, ascending. What is foreign is reported once."""
        looks = self.all()
        for number, look in looks.items():
            if look.kind == "foreign" and number not in self._reported:
                self._reported.add(number)
                logger.warning(
                    "%s was not written by a checkpoint manager, and is left alone. torch_xla_ckpt.load reads it if it "
                    "is a checkpoint",
                    self.at(number),
                )
        return {number: look for number, look in looks.items() if look.kind == "committed"}

    def saved(self, step: int, look: Look) -> Saved:
        """What a committed step's manifest tells of it.

        Raises:
            CheckpointError, OSError: it cannot be read.
        """
        return self._read(step, look)[0]

    def flaw(self, step: int, look: Look, *, thorough: bool = False) -> str | None:
        """Why a committed step cannot be restored, as far as that shows without reading its data.

        Args:
            step, look: as ``committed`` has found it.
            thorough: ask for the size of every file too, not only whether it was listed.
        """
        if step in self.damaged:
            return self.damaged[step]
        try:
            files = self._read(step, look)[1]
            missing = [name for name in files if name not in look.names]
            if thorough and not missing:
                missing = self.folder(step).missing(files)
        except (CheckpointError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return f"{', '.join(missing[:3])} is missing or too short" if missing else None

    def nbytes(self, step: int, look: Look) -> int:
        """The bytes of a step's data files."""
        return sum(self._read(step, look)[1].values())

    def remove(self, step: int, look: Look) -> None:
        """Delete a step. Its commit goes first, so that it is never there in part; unknown files stay."""
        folder = self.folder(step)
        folder.remove([name for name in (".metadata", _THEIRS) if name in look.names])
        folder.remove(sorted(name for name in look.names if _is_ours(name)))
        if not folder.remote:
            with suppress(OSError):  # there is something else in it
                os.rmdir(self.at(step).path)

    def remove_litter(self, step: int, look: Look) -> bool:
        """Delete what is left of a save or a deletion of ours, if there is nothing else in the folder."""
        if look.kind != "unfinished" or not all(commit.is_part(name, stock=False) for name in look.names):
            return False
        self.remove(step, look)
        return True

    def _read(self, step: int, look: Look) -> tuple[Saved, Mapping[str, int]]:
        """What a manifest tells, and the data files it lists with their sizes; it is read once."""
        facts = self._known.get((step, look))
        if facts is None:
            found = commit.committed(self.folder(step)).manifest
            if found is None:
                facts = Saved(step), {}
            else:
                user = found.user_metadata
                given = user.get(KEY, {}) if isinstance(user, dict) else {}
                time = datetime.fromisoformat(found.time)
                facts = Saved(step, time, given.get("metrics") or {}, given.get("metadata")), dict(found.files)
            self._known[step, look] = facts
        return facts

    def _look(self, step: int) -> Look:
        names = frozenset(self.folder(step).names())
        if ".metadata" not in names:
            return Look("unfinished", names)
        ours = _THEIRS in names or any(_MANIFEST.fullmatch(name) for name in names)
        return Look("committed" if ours else "foreign", names)


def _is_ours(name: str) -> bool:
    return commit.is_part(name) or name == _THEIRS

"""Folders of a run without ``.metadata``: a save that runs or broke off, a deletion, or a step that lost its commit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch_xla_ckpt.manager.journal import Journal
from torch_xla_ckpt.manager.step_folder import TORCH_XLA_MARKER
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.protocols import Entry, Folder
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import complete_saves, is_checkpoint_file

_ABOUT_COMMITS = ("saved", "deleted", "failed to delete", "removed leftovers")  # events of the journal


@dataclass(frozen=True)
class UncommittedStep:
    """A folder of a run that is named like a step, has files of a checkpoint, and has no ``.metadata``.

    Args:
        step: the step's number.
        files: number of files in the folder.
        nbytes: their size in bytes.
        flaw: what shows that the step was committed, and was not deleted since; None if nothing shows that.
    """

    step: int
    files: int
    nbytes: int
    flaw: str | None


def uncommitted_steps(steps: Steps, journal: Journal) -> tuple[UncommittedStep, ...]:
    """Return the folders without ``.metadata`` that have files of a checkpoint, ascending.

    A deletion removes ``.metadata`` first, and writes its line in the journal last. While it runs, a step may look for
    a moment as if it had lost its commit. So look twice before you call such a step damaged.

    Args:
        steps: the run's steps.
        journal: the run's journal.
    """
    looks = steps.looks(steps.numbers())
    numbers = [step for step, folder in looks.items() if folder.kind == "unfinished"]
    if not numbers:
        return ()
    newest = max((step for step, folder in looks.items() if folder.kind in ("committed", "damaged")), default=-1)
    last = _last_events(journal, numbers)
    found = []
    for step in numbers:
        try:
            listing = steps.folder(step).listing()
        except (FileNotFoundError, NotADirectoryError):  # deleted just now
            continue
        if any(is_checkpoint_file(name) or name == TORCH_XLA_MARKER for name in listing):
            flaw = _flaw(steps, step, listing, last.get(step, ""), is_newest=step > newest)
            found.append(UncommittedStep(step, len(listing), sum(entry.size for entry in listing.values()), flaw))
    return tuple(found)


def lost_commit(steps: Steps, step: int) -> str | None:
    """Return a description of the damage if a step has lost its ``.metadata`` and nothing else; None if it has not."""
    folder = steps.folder(step)
    try:
        return _lost_commit(folder, folder.listing())
    except (FileNotFoundError, NotADirectoryError):  # deleted just now
        return None


def _lost_commit(folder: Folder, listing: Mapping[str, Entry]) -> str | None:
    complete = complete_saves(folder, listing)
    if not complete:
        return None
    return f"{METADATA} is missing, and all other files of the committed save {complete[0]} are there"


def _last_events(journal: Journal, numbers: Collection[int]) -> Mapping[int, str]:
    """Return the last event of the journal about the commit of each step."""
    last = {}
    for event in journal.events():
        step, what = event.get("step"), event.get("event")
        if isinstance(step, int) and step in numbers and isinstance(what, str) and what in _ABOUT_COMMITS:
            last[step] = what
    return last


def _flaw(steps: Steps, step: int, listing: Mapping[str, Entry], last: str, *, is_newest: bool) -> str | None:
    """Return what shows that a step was committed and not deleted; None if nothing does.

    Args:
        steps: the run's steps.
        step: the step's number.
        listing: the files of the step's folder.
        last: the last event of the journal about the step's commit; "" if there is none.
        is_newest: whether no committed step is newer. Retention deletes only older steps.
    """
    if last not in ("", "saved"):
        return None
    if (lost := _lost_commit(steps.folder(step), listing)) is not None:
        return lost
    if TORCH_XLA_MARKER in listing:
        return f"{METADATA} is missing, and {TORCH_XLA_MARKER} shows that torch_xla's manager had committed the step"
    if last == "saved" and is_newest:
        return f"{METADATA} and other files are missing, and the run's journal says that the step was committed"
    return None

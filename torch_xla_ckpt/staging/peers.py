"""The process group of async saves, and the search for the rank that made a save fail."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError

# Seconds between two looks for a roll call, and seconds to wait for the answers.
_LOOK = 1.0
_PATIENCE = 10.0
# Number of saves whose paths are kept for answers; more than are ever under way.
_REMEMBERED = 64


class Blame(NamedTuple):
    """The reason why the ranks could not coordinate a save.

    Args:
        what: the ranks and what they did. Ranks are those of the default group.
        remedy: what the user can do, as a sentence.
    """

    what: str
    remedy: str


class Peers:
    """A gloo group for async saves, which can find the rank to blame when a save fails.

    gloo reports that a connection was lost or that a wait took too long, but not which rank is the reason. So the
    rank that sees an error calls the roll, through the store that torch.distributed was set up with. In every process a
    thread answers, even while other threads wait. The answer tells which saves the process has begun.

    All ranks must create this at the same point of the program.

    Args:
        of: the group whose ranks take part. None: the default group.
        timeout: longest wait in a collective.
        doing: the operation that needs the group, for error messages.

    Attributes:
        group: the gloo group.
        instead_of: groups that ``group`` replaces when DCP would use one of them; None stands for the default group.
        has_failed: whether a save could not be coordinated. Then the group must not be used again.

    Raises:
        CheckpointError: a rank did not come in time.
    """

    def __init__(self, of: dist.ProcessGroup | None, timeout: timedelta, doing: str):
        self.instead_of = (None, of)
        self.group = Processes(of).new_group(timeout, doing)
        self.has_failed = False
        self._timeout = timeout
        self._rank = dist.get_rank(self.group)
        self._ranks = dist.get_process_group_ranks(self.group)
        self._name = f"torch_xla_ckpt/{self.group.group_name}"
        self._store = _dcp.default_store()
        self._begun = 0
        self._paths: dict[int, str | None] = {}  # by the save's number
        self._gone: list[int] = []  # ranks that did not answer the roll call
        self._closed = threading.Event()
        threading.Thread(target=self._answer, name="SPMDStager-roll-call", daemon=True).start()

    @property
    def is_destroyed(self) -> bool:
        """Whether the program has destroyed the group in this process."""
        return not _dcp.is_alive(self.group)

    @property
    def is_usable(self) -> bool:
        """Whether another save can coordinate through the group."""
        return not (self.has_failed or self.is_destroyed)

    def begin(self) -> int:
        """Count a save that begins, and return its number, which is the same on all ranks."""
        self._begun += 1
        return self._begun

    def goes_to(self, number: int, path: str | None) -> None:
        """Record the path of a save."""
        self._paths[number] = path
        self._paths.pop(number - _REMEMBERED, None)

    def blame(self, number: int) -> Blame:
        """Find the reason why a save could not be coordinated.

        Args:
            number: the save's number, from ``begin``.
        """
        self.has_failed = True
        if self.is_destroyed:
            return Blame(
                "the process group was destroyed in this process before the save had ended",
                "Close the stager or the manager before dist.destroy_process_group()",
            )
        try:
            answers, silent = self._call_roll()
        except RuntimeError as error:
            return Blame(
                f"rank 0 or the launcher is gone, and with it the store that knows which other ranks are ({error})",
                "Restart the run from there",
            )
        if silent:
            self._gone = silent
            return Blame(f"{self._named(silent)} is gone", "Restart the run from there")
        return self._blamed(number, answers)

    def require_present(self, doing: str) -> None:
        """Do not wait again for a rank that a failed save has found to be gone.

        Args:
            doing: the operation that needs the ranks, for the error.

        Raises:
            CheckpointError: a rank that did not answer the roll call has not answered it since.
        """
        if self.is_destroyed or not self._gone:
            return
        try:
            gone = [n for n in self._gone if not self._store.check([f"{self._name}/{n}"])]
        except RuntimeError:  # the store is gone, and setting up a new group fails
            return
        if gone:
            raise CheckpointError(
                f"{doing} failed: {self._named(gone)} is gone, as an earlier async save has found. Nothing was saved. "
                "Restart the run from the last checkpoint"
            )

    def close(self) -> None:
        """Leave the group, without waiting for the other ranks."""
        self._closed.set()
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(f"{self._name}/{self._rank}", self._own_answer(closed=True))
        if not self.is_destroyed:
            dist.destroy_process_group(self.group)

    def _call_roll(self) -> tuple[dict[int, Any], list[int]]:
        """Call the roll.

        Returns:
            The answers of the other ranks, and the ranks that did not answer. Ranks are those of ``group``.
        """
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + _PATIENCE
        self._store.set(f"{self._name}/call", "1")
        while True:
            for other in range(len(self._ranks)):
                key = f"{self._name}/{other}"
                if other != self._rank and other not in answers and self._store.check([key]):
                    answers[other] = json.loads(self._store.get(key))
            silent = [n for n in range(len(self._ranks)) if n != self._rank and n not in answers]
            if not silent or time.monotonic() > deadline:
                return answers, silent
            self._closed.wait(_LOOK / 5)

    def _blamed(self, number: int, answers: dict[int, Any]) -> Blame:
        """Return the rank to blame when all ranks have answered."""
        destroyed = [n for n, answer in answers.items() if answer["destroyed"]]
        if destroyed:
            return Blame(
                f"{self._named(destroyed)} destroyed the process group before the save had ended",
                "Close the stager or the manager before dist.destroy_process_group()",
            )
        absent = [n for n, answer in answers.items() if answer["begun"] < number]
        if absent:
            what = "; ".join(f"{self._named([n])} has not begun this save ({_last(answers[n])})" for n in absent)
            return Blame(
                f"{what} within timeout={self._timeout}",
                "All ranks must save the same steps in the same order. If a rank is only late, raise timeout=",
            )
        own = self._paths.get(number)
        paths = {n: answer["paths"].get(str(number)) for n, answer in answers.items()}
        elsewhere = {n: path for n, path in paths.items() if path is not None and path != own}
        if elsewhere:
            what = "; ".join(f"{self._named([n])} saves to {path} instead" for n, path in elsewhere.items())
            return Blame(what, "All ranks must save the same steps in the same order")
        return Blame(
            "all ranks are running and have begun this save",
            f"If one rank may be late by more than timeout={self._timeout}, raise timeout=",
        )

    def _named(self, numbers: list[int]) -> str:
        return f"rank {', '.join(str(self._ranks[n]) for n in numbers)}"

    def _own_answer(self, closed: bool) -> str:
        """Return this process's answer to the roll call, as JSON."""
        paths = {str(number): path for number, path in list(self._paths.items())}
        return json.dumps({"begun": self._begun, "paths": paths, "closed": closed, "destroyed": self.is_destroyed})

    def _answer(self) -> None:
        """Wait for a roll call, and answer it once."""
        try:
            while not self._closed.wait(_LOOK):
                if self._store.check([f"{self._name}/call"]):
                    self._store.set(f"{self._name}/{self._rank}", self._own_answer(closed=False))
                    return
        except RuntimeError:
            return  # the store is gone, so no rank can call


def joined(peers: Peers | None, of: dist.ProcessGroup | None, timeout: timedelta, doing: str) -> Peers | None:
    """Return a group of the ranks that works. All ranks call this in the same order.

    Args:
        peers: the group so far; None if there is none. It is closed if it no longer works.
        of, timeout, doing: see ``Peers``.

    Returns:
        ``peers`` or a new group; None if there is one process only.

    Raises:
        CheckpointError: a rank did not come in time, or the default group was destroyed.
    """
    if peers is not None and peers.is_usable:
        return peers
    if peers is not None and peers.is_destroyed and Processes(None).alone:
        raise CheckpointError(
            "the process group that this stager saves with was destroyed. Initialise torch.distributed again, or "
            "create another stager to save from this process alone, and pass it as stager="
        )
    if Processes(of).size == 1:
        return peers
    if peers is not None:
        peers.require_present(doing)
        peers.close()
    return Peers(of, timeout, doing)


def _last(answer: Any) -> str:
    """Return what a rank that has not begun a save did last, in words."""
    path = answer["paths"].get(str(answer["begun"])) or "its storage"
    last = "it has begun no save" if not answer["begun"] else f"its last save was to {path}"
    return f"it has closed its stager; {last}" if answer["closed"] else last

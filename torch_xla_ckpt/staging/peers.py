"""The processes that save together, beside whatever their training loops say to each other."""

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

# How often a process looks whether somebody calls the roll, and how long one waits for the answers, in seconds.
_LOOK = 1.0
_PATIENCE = 10.0
# Saves whose paths are remembered. More are never under way.
_REMEMBERED = 64


class Blame(NamedTuple):
    """Why a save broke off between the processes.

    Args:
        what: the ranks and what they did, in the default group's numbering.
        remedy: what to do.
    """

    what: str
    remedy: str


class Peers:
    """A process group of our own, and a way to find out who is to blame when it fails.

    gloo tells that a connection is lost or that a wait was too long, not who is to blame. So whoever sees an error
    calls the roll through the store that torch.distributed was set up with, and a thread in every process answers,
    whatever its other threads are waiting for. The answer says which saves the process has begun.

    Every process must create it at the same point of the program.

    Args:
        of: the processes. None: all.
        timeout: for one wait in a collective.
        doing: what the group is created for, for error messages.

    Raises:
        CheckpointError: a process did not come in time.
    """

    def __init__(self, of: dist.ProcessGroup | None, timeout: timedelta, doing: str):
        self.instead_of = (None, of)
        self.group = Processes(of).new_group(timeout, doing)
        self.failed = False
        self._timeout = timeout
        self._rank = dist.get_rank(self.group)
        self._ranks = dist.get_process_group_ranks(self.group)
        self._name = f"torch_xla_ckpt/{self.group.group_name}"
        self._store = _dcp.default_store()
        self._begun = 0
        self._paths: dict[int, str | None] = {}  # by the number of the save
        self._closed = threading.Event()
        threading.Thread(target=self._answer, name="SPMDStager-roll-call", daemon=True).start()

    @property
    def destroyed(self) -> bool:
        """Whether the program has destroyed the group in this process."""
        return not _dcp.is_alive(self.group)

    def begin(self) -> int:
        """Count a save that begins; returns its number, which is the same in all processes."""
        self._begun += 1
        return self._begun

    def goes_to(self, number: int, path: str | None) -> None:
        """Note where a save writes."""
        self._paths[number] = path
        self._paths.pop(number - _REMEMBERED, None)

    def blame(self, number: int) -> Blame:
        """Find out why a save could not be coordinated.

        Args:
            number: of the save, from ``begin``.
        """
        self.failed = True
        if self.destroyed:
            return Blame(
                "the process group was destroyed in this process before the save had ended",
                "Close the stager or the manager before dist.destroy_process_group()",
            )
        try:
            answers, silent = self._call()
        except RuntimeError as error:
            return Blame(
                f"rank 0 or the launcher is gone, with the store through which to ask who else ({error})",
                "Restart the run from there",
            )
        if silent:
            return Blame(f"{self._named(silent)} is gone", "Restart the run from there")
        return self._judged(number, answers)

    def close(self) -> None:
        """Leave. Does not wait for the others."""
        self._closed.set()
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(f"{self._name}/{self._rank}", self._answered(closed=True))
        if not self.destroyed:
            dist.destroy_process_group(self.group)

    def _call(self) -> tuple[dict[int, Any], list[int]]:
        """Call the roll: the answers of the other processes, and those that do not answer."""
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

    def _judged(self, number: int, answers: dict[int, Any]) -> Blame:
        """Whom to blame if all processes have answered."""
        destroyed = [n for n, answer in answers.items() if answer["destroyed"]]
        if destroyed:
            return Blame(
                f"{self._named(destroyed)} destroyed the process group before the save had ended",
                "Close the stager or the manager before dist.destroy_process_group()",
            )
        absent = [n for n, answer in answers.items() if answer["begun"] < number]
        if absent:
            what = "; ".join(f"{self._named([n])} has not begun it ({_last(answers[n])})" for n in absent)
            return Blame(
                f"{what}, and timeout={self._timeout} is over",
                "All ranks must save the same steps in the same order. If a rank is only late, raise timeout=",
            )
        own = self._paths.get(number)
        paths = {n: answer["paths"].get(str(number)) for n, answer in answers.items()}
        elsewhere = {n: path for n, path in paths.items() if path is not None and path != own}
        if elsewhere:
            what = "; ".join(f"{self._named([n])} saves to {path} meanwhile" for n, path in elsewhere.items())
            return Blame(what, "All ranks must save the same steps in the same order")
        return Blame("all of them are there", f"If they may be far apart, raise timeout={self._timeout}")

    def _named(self, numbers: list[int]) -> str:
        return f"rank {', '.join(str(self._ranks[n]) for n in numbers)}"

    def _answered(self, closed: bool) -> str:
        """What this process says about itself."""
        paths = {str(number): path for number, path in list(self._paths.items())}
        return json.dumps({"begun": self._begun, "paths": paths, "closed": closed, "destroyed": self.destroyed})

    def _answer(self) -> None:
        try:
            while not self._closed.wait(_LOOK):
                if self._store.check([f"{self._name}/call"]):
                    self._store.set(f"{self._name}/{self._rank}", self._answered(closed=False))
                    return
        except RuntimeError:
            return  # the store is gone, and with it whoever could call


def _last(answer: Any) -> str:
    """What a process that has not begun a save did last."""
    path = answer["paths"].get(str(answer["begun"])) or "its storage"
    last = "it has begun none" if not answer["begun"] else f"its last one went to {path}"
    return f"it has closed its stager; {last}" if answer["closed"] else last

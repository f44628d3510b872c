"""What all ranks know at a step: whether to expect preemption, and what became of the saves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.manager.active import ActiveSaves, Blocked

_MOST_SAVES = 64  # saves that are remembered; earlier ones have ended long ago


class Facts(NamedTuple):
    """What all ranks know at a step.

    Args:
        is_preempted: whether to expect preemption.
        seconds: seconds since the last save began, on the clock of rank 0.
        is_saving: whether a save is under way on any rank.
        blocked: seconds for which the last calls held up the slowest rank.
    """

    is_preempted: bool
    seconds: float
    is_saving: bool
    blocked: Blocked


@dataclass(frozen=True)
class _Save:
    """A save that has begun, and has not failed as far as all ranks know.

    Args:
        number: the number of the save, from 1; 0 for the step that the run started from.
        step: the step that is saved; None for a run that starts without a step.
        began: when the save began, in seconds of this process's clock.
        seconds_before: the seconds that ``at`` returned when the save began.
        for_preemption: True if the save was made because of preemption.
    """

    number: int
    step: int | None
    began: float
    seconds_before: float
    for_preemption: bool


class Agreement:
    """What all ranks know at a step.

    Each call of ``at`` starts an exchange between the ranks, and ends the exchange that the call before it started. So
    no rank waits for a slower one, and the answer is one step old. All ranks must call ``at`` for the same steps.

    A save counts from its beginning until all ranks know that it has failed. They learn it at the same step.

    Args:
        processes: the ranks, in a gloo group.
        is_signalled: returns whether this rank is about to be preempted.
        active: the saves that are under way on this rank.
    """

    def __init__(self, processes: Processes, is_signalled: Callable[[], bool], active: ActiveSaves):
        self._processes = processes
        self._is_signalled = is_signalled
        self._active = active
        self._saves = [_Save(0, None, time.monotonic(), 0.0, False)]
        self._count = 0
        self._failures: set[int] = set()  # saves that this rank knows to have failed; other ranks may not know it yet
        self._lock = threading.Lock()
        self._step: int | None = None
        self._seconds = 0.0
        self._exchange: tuple[Any, torch.Tensor] | None = None  # the collective under way, and its result
        self._is_outdated = False  # a save has begun since the exchange was started
        self._is_preempted = False
        self._is_saving = False
        self._blocked = Blocked()

    @property
    def last(self) -> int | None:
        """The step that was saved last, or restored after that."""
        return self._saves[-1].step

    @property
    def preemption_step(self) -> int | None:
        """The step that was saved because of preemption; None if there is none yet."""
        return next((save.step for save in self._saves if save.for_preemption), None)

    def restored(self, step: int | None) -> None:
        """Take note that the run continues from a step."""
        with self._lock:
            self._saves[-1] = replace(self._saves[-1], step=step)

    def begin(self, step: int, for_preemption: bool) -> int:
        """Take note that a save begins, on all ranks.

        Returns:
            The number of the save.
        """
        with self._lock:
            self._count += 1
            self._saves.append(_Save(self._count, step, time.monotonic(), self._seconds, for_preemption))
            if len(self._saves) > _MOST_SAVES:
                forgotten, second = self._saves[0], self._saves[1]
                self._saves[1] = replace(second, for_preemption=forgotten.for_preemption or second.for_preemption)
                del self._saves[0]
            self._seconds = 0.0
            self._is_outdated = self._is_saving = True
            return self._count

    def failed(self, number: int, *, everywhere: bool = False) -> None:
        """Take note that a save has failed, so that it does not count.

        Args:
            number: the number of the save.
            everywhere: True if all ranks call this at the same point of the program. Otherwise the other ranks learn
                of the failure in the next exchanges.
        """
        with self._lock:
            if everywhere or self._processes.alone:
                self._forget(number)
            elif any(save.number == number for save in self._saves):
                self._failures.add(number)

    def at(self, step: int) -> Facts:
        """Return what all ranks know at a step.

        The answer is the same on all ranks. A second call for the same step returns the same answer.
        """
        if step != self._step:
            self._step = step
            self._end_and_start_exchange()
        return Facts(self._is_preempted, self._seconds, self._is_saving, self._blocked)

    def close(self) -> None:
        """End the last exchange, which all ranks have started if they have taken the same steps."""
        if self._exchange is not None:
            with suppress(RuntimeError):
                self._exchange[0].wait(timedelta(seconds=5))
            self._exchange = None

    def _end_and_start_exchange(self) -> None:
        elapsed = time.monotonic() - self._saves[-1].began
        if self._processes.alone:
            self._is_preempted, self._seconds = self._is_preempted or self._is_signalled(), elapsed
            self._is_saving, self._blocked = bool(self._active.steps()), self._active.blocked
            return
        if self._exchange is not None:
            work, result = self._exchange
            self._exchange = None
            work.wait()
            signalled, seconds, failed, saving, *blocked = result.tolist()
            self._blocked = Blocked(*blocked)
            self._is_preempted = self._is_preempted or bool(signalled)
            with self._lock:
                self._is_saving = self._is_outdated or bool(saving)
                self._seconds, self._is_outdated = (0.0 if self._is_outdated else seconds), False
                self._forget(int(failed))
        with self._lock:
            failed = max(self._failures, default=0)
        own = (
            float(self._is_signalled()),
            elapsed if self._processes.rank == 0 else 0.0,
            float(failed),
            float(bool(self._active.steps())),
            *self._active.blocked,
        )
        result = torch.tensor(own, dtype=torch.float64)
        work = dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self._processes.group, async_op=True)
        self._exchange = work, result

    def _forget(self, number: int) -> None:
        """Forget a save that has failed."""
        self._failures.discard(number)
        save = next((save for save in self._saves if save.number == number), None)
        if number and save is not None:
            if save is self._saves[-1]:
                self._seconds, self._is_outdated = save.seconds_before, False
            self._saves.remove(save)
            if not self._saves:
                self._saves.append(_Save(0, None, save.began, save.seconds_before, False))

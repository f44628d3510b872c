"""What all processes know at a step: whether one is to be preempted, and which saves count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_xla_ckpt.coordination import Processes

_MARKS = 64  # saves that are remembered; those before have ended long ago


@dataclass(frozen=True)
class _Mark:
    """A save that has begun, and has not failed as far as all processes know.

    Args:
        number: of the call, from 1; 0 for what was there before.
        step: that is saved; None if there is none.
        began: on this process's clock.
        before: the seconds that ``at`` told when it began.
        farewell: whether it was made because of preemption.
    """

    number: int
    step: int | None
    began: float
    before: float
    farewell: bool


class Agreement:
    """What all processes know at a step.

    Each call of ``at`` begins an exchange and ends the one that the call before began, so that nobody waits for a
    slower process: the answer is that of the step before. All processes must call it for the same steps.

    A save counts from its beginning until all processes know that it has failed, which they learn at the same step.

    Args:
        processes: that agree, over a gloo group.
        terminated: returns whether this process is to be preempted.
    """

    def __init__(self, processes: Processes, terminated: Callable[[], bool]):
        self._processes = processes
        self._terminated = terminated
        self._marks = [_Mark(0, None, time.monotonic(), 0.0, False)]
        self._count = 0
        self._failures: set[int] = set()  # calls that this process knows to have failed, and the others may not
        self._lock = threading.Lock()
        self._step: int | None = None
        self._seconds = 0.0
        self._under_way: tuple[Any, torch.Tensor] | None = None
        self._outdated = False
        self.preempted = False

    @property
    def last(self) -> int | None:
        """The step that was saved last, or restored after that."""
        return self._marks[-1].step

    @property
    def farewell(self) -> int | None:
        """The step that was saved because of preemption."""
        return next((mark.step for mark in self._marks if mark.farewell), None)

    def restored(self, step: int | None) -> None:
        """The run goes on from a step."""
        with self._lock:
            self._marks[-1] = replace(self._marks[-1], step=step)

    def begin(self, step: int, farewell: bool) -> int:
        """A save begins, in all processes.

        Returns:
            The number of the call.
        """
        with self._lock:
            self._count += 1
            self._marks.append(_Mark(self._count, step, time.monotonic(), self._seconds, farewell))
            if len(self._marks) > _MARKS:
                # Why the run was told to end stays known.
                self._marks[1] = replace(self._marks[1], farewell=self._marks[0].farewell or self._marks[1].farewell)
                del self._marks[0]
            self._seconds = 0.0
            self._outdated = True  # what is being exchanged was measured before
            return self._count

    def failed(self, number: int, *, everywhere: bool = False) -> None:
        """A save has failed, so it does not count.

        Args:
            number: of the call.
            everywhere: all processes say so at this point of the program. Otherwise they learn it in the next
                exchanges.
        """
        with self._lock:
            if everywhere or self._processes.alone:
                self._forget(number)
            elif any(mark.number == number for mark in self._marks):
                self._failures.add(number)

    def at(self, step: int) -> tuple[bool, float]:
        """Whether to expect preemption, and the seconds since the last save began; the same in all processes.

        Asking again for the same step gives the same answer.
        """
        if step != self._step:
            self._step = step
            self._exchange()
        return self.preempted, self._seconds

    def close(self) -> None:
        """End the last exchange, which all processes have begun if they have taken the same steps."""
        if self._under_way is not None:
            with suppress(RuntimeError):
                self._under_way[0].wait(timedelta(seconds=5))
            self._under_way = None

    def _exchange(self) -> None:
        elapsed = time.monotonic() - self._marks[-1].began
        if self._processes.alone:
            self.preempted, self._seconds = self.preempted or self._terminated(), elapsed
            return
        if self._under_way is not None:
            work, facts = self._under_way
            self._under_way = None
            work.wait()
            terminated, seconds, failed = facts.tolist()
            self.preempted = self.preempted or bool(terminated)
            with self._lock:
                self._seconds, self._outdated = (0.0 if self._outdated else seconds), False
                self._forget(int(failed))
        with self._lock:
            failed = max(self._failures, default=0)
        is_first = self._processes.rank == 0
        facts = torch.tensor(
            [float(self._terminated()), elapsed if is_first else 0.0, float(failed)], dtype=torch.float64
        )
        work = dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=self._processes.group, async_op=True)
        self._under_way = work, facts

    def _forget(self, number: int) -> None:
        self._failures.discard(number)
        mark = next((mark for mark in self._marks if mark.number == number), None)
        if number and mark is not None:
            if mark is self._marks[-1]:
                self._seconds, self._outdated = mark.before, False
            self._marks.remove(mark)
            if not self._marks:
                self._marks.append(_Mark(0, None, mark.began, mark.before, False))

"""Noticing that the machine is about to be taken away, in all processes at the same step."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class Terminated:
    """Notes a SIGTERM instead of dying of it. A handler that was there before is called too."""

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None
        self._installed = False

    def install(self) -> None:
        """Begin to listen. Where that is impossible, which is logged, nothing is ever received."""
        try:
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._installed = True
        except ValueError as error:  # not in the main thread
            logger.warning("SIGTERM is not noticed, so nothing is saved on preemption: %s", error)

    def restore(self) -> None:
        """Put back the handler that was there before, unless somebody has replaced ours."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if callable(self._before):
            self._before(number, frame)


class Agreement:
    """What all processes know at a step: whether one of them is to be preempted, and how long ago the last save was.

    Each call of ``at`` begins an exchange and ends the one that the call before began, so that nobody waits for a
    slower process: the answer is that of the step before. All processes must call it for the same steps.

    Args:
        group: a gloo group; None for one process.
        terminated: whether this process is to be preempted.
    """

    def __init__(self, group: dist.ProcessGroup | None, terminated: Callable[[], bool]):
        self._group = group
        self._terminated = terminated
        self._began = time.monotonic()
        self._step: int | None = None
        self._seconds = 0.0
        self._under_way: tuple[Any, torch.Tensor] | None = None
        self._outdated = False
        self.preempted = False

    def saving(self) -> None:
        """A save begins."""
        self._began = time.monotonic()
        self._seconds = 0.0
        self._outdated = True  # what is being exchanged was measured before

    def at(self, step: int) -> tuple[bool, float]:
        """Whether to expect preemption, and the seconds since the last save began; the same in all processes.

        Asking again for the same step gives the same answer.
        """
        if step != self._step:
            self._step = step
            self._exchange()
        return self.preempted, self._seconds

    def _exchange(self) -> None:
        elapsed = time.monotonic() - self._began
        if self._group is None:
            self.preempted, self._seconds = self.preempted or self._terminated(), elapsed
            return
        if self._under_way is not None:
            work, facts = self._under_way
            work.wait()
            terminated, self._seconds = facts.tolist()
            self.preempted = self.preempted or bool(terminated)
            if self._outdated:
                self._seconds, self._outdated = 0.0, False
        is_first = dist.get_rank(self._group) == 0
        facts = torch.tensor([float(self._terminated()), elapsed if is_first else 0.0], dtype=torch.float64)
        work = dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._under_way = work, facts

    def close(self) -> None:
        """End the last exchange, which all processes have begun if they have taken the same steps."""
        if self._under_way is not None:
            with suppress(RuntimeError):
                self._under_way[0].wait(timedelta(seconds=5))
            self._under_way = None

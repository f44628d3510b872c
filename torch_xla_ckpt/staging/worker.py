"""The thread in which a stager's saves run, and the end of all stagers when the program exits."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from torch_xla_ckpt.errors import CheckpointError

logger = logging.getLogger(__name__)


class Worker:
    """A thread that runs jobs one after the other.

    The thread stays for later jobs, because a new thread waits for a free processor before it starts.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after all jobs that were submitted before."""
        if not self._started:
            self._started = True
            threading.Thread(target=_work, args=(self._jobs,), name="SPMDStager").start()
        self._jobs.put(job)

    def stop(self) -> None:
        """Let the thread end after the jobs that were submitted."""
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # else the job's state would stay in memory until the next job


class Closeable(Protocol):
    """An object to be closed when the program exits."""

    def close(self) -> None: ...


_open: weakref.WeakSet[Closeable] = weakref.WeakSet()
_is_registered = False


def close_at_exit(stager: Closeable) -> None:
    """Close a stager when the program exits, if it still exists and was not closed before.

    The stager is closed before the interpreter shuts down its executors, which network storage needs. ``atexit`` runs
    after that.
    """
    global _is_registered
    _open.add(stager)
    if not _is_registered:
        _is_registered = True
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def forget(stager: Closeable) -> None:
    """Undo ``close_at_exit`` for a stager that was closed."""
    _open.discard(stager)


def _close_all() -> None:
    for stager in list(_open):
        try:
            stager.close()
        except CheckpointError as error:
            logger.error("%s", error)

"""How the other ranks learn which deletions rank 0 has finished, without a collective."""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import timedelta
from typing import Any

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.runtime import forks

logger = logging.getLogger(__name__)

_POLL = 0.02  # seconds between two requests to the store


class DeletionStatus:
    """Rank 0's progress in deleting steps, in the store that torch.distributed was set up with.

    Rank 0 calls ``save_ended``, ``retired`` and ``finished``. The other ranks call ``retired_steps`` and ``wait``.

    Args:
        processes: the manager's processes.
    """

    def __init__(self, processes: Processes):
        self._processes = processes
        self._store: Any = None
        if not processes.alone and processes.group is not None:
            self._store = _dcp.default_store()
            self._key = f"torch_xla_ckpt/deletions/{processes.group.group_name}"
        self._renew()
        forks.renew_in_child(self, DeletionStatus._renew)
        self._ended: set[int] = set()  # saves that have ended, after one that has not
        self._done = 0  # all saves up to this number have ended, and their deletions too
        self._is_finished = False
        self._retired: frozenset[int] = frozenset()
        self._never = threading.Event()

    def _renew(self) -> None:
        self._lock = threading.Lock()

    # On rank 0

    def save_ended(self, number: int) -> None:
        """Publish that a save has ended, and that the steps it made superfluous are deleted.

        Args:
            number: the save's number, as ``Agreement.begin`` returned it.
        """
        with self._lock:
            self._ended.add(number)
            while self._done + 1 in self._ended:
                self._done += 1
                self._ended.discard(self._done)
            self._publish()

    def retired(self, steps: frozenset[int]) -> None:
        """Publish which steps are deleted while their folders are still there."""
        with self._lock:
            self._retired = steps
            self._publish()

    def finished(self) -> None:
        """Publish that nothing will be deleted any more."""
        with self._lock:
            self._is_finished = True
            self._publish()

    # On the other ranks

    def retired_steps(self) -> frozenset[int]:
        """Return the deleted steps whose folders are still there, as rank 0 has published them."""
        if self._store is None or self._processes.rank == 0:
            return frozenset()
        return frozenset(self._published().get("retired", ()))

    def wait(self, number: int, timeout: timedelta) -> None:
        """Wait until rank 0 has finished the deletions of all saves up to a number.

        Raises:
            CheckpointError: rank 0 has not finished in time.
        """
        if self._store is None or self._processes.rank == 0:
            return
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            published = self._published()
            if published.get("finished") or published.get("done", 0) >= number:
                return
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank 0 did not finish deleting superfluous steps within {timeout}. The saves are committed. If "
                    "the storage is slow, give the manager a longer timeout="
                )
            self._never.wait(_POLL)

    def _publish(self) -> None:
        if self._store is None or self._processes.rank != 0:
            return
        status = {"done": self._done, "finished": self._is_finished, "retired": sorted(self._retired)}
        try:
            self._store.set(self._key, json.dumps(status))
        except RuntimeError as error:  # the other ranks are ending
            logger.info("the other ranks could not be told which steps are deleted: %s", error)

    def _published(self) -> dict[str, Any]:
        try:
            if not self._store.check([self._key]):
                return {}
            return dict(json.loads(self._store.get(self._key)))
        except RuntimeError as error:
            logger.info("rank 0 could not be asked which steps are deleted: %s", error)
            return {"finished": True}

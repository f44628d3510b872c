"""How the other ranks learn what the first one has deleted, without meeting it in a collective."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.runtime import forks

logger = logging.getLogger(__name__)

_LOOK = 0.02  # seconds between two looks


class Sweeps:
    """Deletions of the first rank, told through the store that torch.distributed was set up with.

    Args:
        processes: of the manager.
    """

    def __init__(self, processes: Processes):
        self._processes = processes
        self._store: Any = None
        if not processes.alone and processes.group is not None:
            self._store = _dcp.default_store()
            self._key = f"torch_xla_ckpt/swept/{processes.group.group_name}"
        self._renew()
        forks.renew_in_child(self, Sweeps._renew)
        self._ended: set[int] = set()
        self._told = 0  # all calls up to this one have ended, and what they made superfluous is deleted
        self._is_over = False
        self._retired: frozenset[int] = frozenset()
        self._never = threading.Event()

    def _renew(self) -> None:
        self._lock = threading.Lock()

    # On the first rank.

    def ended(self, call: int) -> None:
        """A save has ended, and what it made superfluous is deleted."""
        with self._lock:
            self._ended.add(call)
            while self._told + 1 in self._ended:
                self._told += 1
                self._ended.discard(self._told)
            self._publish()

    def retired(self, steps: frozenset[int]) -> None:
        """These steps are deleted, and their folders are still there."""
        with self._lock:
            self._retired = steps
            self._publish()

    def over(self) -> None:
        """Nothing will be deleted any more."""
        with self._lock:
            self._is_over = True
            self._publish()

    # On the others.

    def known_retired(self) -> frozenset[int]:
        """The steps that are deleted, as far as the first rank has told."""
        if self._store is None or self._processes.rank == 0:
            return frozenset()
        return frozenset(self._told_by_first().get("retired", ()))

    def wait(self, call: int, timeout: timedelta, is_closed: Callable[[], bool] = bool) -> None:
        """Wait until the first rank has deleted what the saves up to a call have made superfluous.

        Raises:
            CheckpointError: it has not in time.
        """
        if self._store is None or self._processes.rank == 0:
            return
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            told = self._told_by_first()
            if told.get("over") or told.get("told", 0) >= call:
                return
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank 0 has not told within {timeout} that it has deleted superfluous steps")
            self._never.wait(_LOOK)

    def _publish(self) -> None:
        if self._store is None or self._processes.rank != 0:
            return
        told = {"told": self._told, "over": self._is_over, "retired": sorted(self._retired)}
        try:
            self._store.set(self._key, json.dumps(told))
        except RuntimeError as error:  # the other ranks are ending
            logger.info("what was deleted could not be told to the other ranks: %s", error)

    def _told_by_first(self) -> dict[str, Any]:
        try:
            if not self._store.check([self._key]):
                return {}
            return dict(json.loads(self._store.get(self._key)))
        except RuntimeError as error:
            logger.info("what rank 0 has deleted could not be asked for: %s", error)
            return {"over": True}

"""One save of a manager: its writer, what is measured of it, and which saves are under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from torch_xla_ckpt.manager.retention import Retention
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage import ShardWriter


class Call:
    """A call to ``save`` or ``save_async``: how long it blocks, and with which metrics.

    Raises:
        TypeError, ValueError: a metric is no number.
    """

    def __init__(self, metrics: Mapping[str, float] | None):
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        # JSON has no NaN and no infinity.
        self.metrics = {name: value for name, value in numbers.items() if value - value == 0}
        self.mode = "sync"
        self.start = time.perf_counter()
        self._blocked = 0.0
        self._returned = threading.Event()

    def returned(self) -> None:
        """The call returns to the training loop now."""
        self._blocked = time.perf_counter() - self.start
        self._returned.set()

    def facts(self, seconds: float) -> dict[str, Any]:
        """For the journal, once the call has returned."""
        self._returned.wait()
        seconds = max(seconds, self._blocked)
        return {"metrics": self.metrics, "blocked_seconds": self._blocked, "seconds": seconds, "mode": self.mode}


class Writer(ShardWriter):
    """Waits for the deletions of the save before; after the commit, deletes the commits that it makes superfluous.

    Attributes:
        retention: of the process that coordinates the save; None in the others.
        call: the save.
    """

    retention: Retention | None
    call: Call

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.retention is not None:
            self.retention.make_room()
        return super().prepare_local_plan(plan)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        seconds = time.perf_counter() - self.call.start
        if self.retention is not None and self._step is not None:
            # Before ``finish`` returns, no process has returned from the save.
            self.retention.committed(self._step, self._save_id, _nbytes(results), lambda: self.call.facts(seconds))


class UnderWay:
    """Counts the saves of each step that are under way."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._renew()
        forks.renew_in_child(self, UnderWay._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def begin(self, step: int) -> None:
        with self._lock:
            self._counts[step] = self._counts.get(step, 0) + 1

    def end(self, step: int) -> None:
        with self._lock:
            self._counts[step] -= 1
            if not self._counts[step]:
                del self._counts[step]

    def steps(self) -> set[int]:
        with self._lock:
            return set(self._counts)


def _nbytes(results: list[list[WriteResult]]) -> int:
    """The bytes of the data files that a save has written."""
    files: dict[str, int] = {}
    for result in (result for own in results for result in own):
        stored = result.storage_data
        files[stored.relative_path] = max(files.get(stored.relative_path, 0), stored.offset + stored.extent)
    return sum(files.values())

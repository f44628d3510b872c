"""A run that a group of processes has opened: its steps, its journal, and its retention."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.manager.active import ActiveSaves
from torch_xla_ckpt.manager.deletion_status import DeletionStatus
from torch_xla_ckpt.manager.journal import Journal
from torch_xla_ckpt.manager.keep import Keep
from torch_xla_ckpt.manager.preflight import require_shared_folder
from torch_xla_ckpt.manager.retention import Retention
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.manager.verdicts import Verdict, Verdicts
from torch_xla_ckpt.storage import Location


class Run:
    """A run's folder, opened by all ranks together.

    Args:
        location: the run's folder.
        process_group: the processes that open it; None for all.
        keep: the retention policy.
        timeout: how long processes wait for each other.

    Attributes:
        processes: the ranks, in a gloo group of their own; or one process without a group.
        closing: an event that ends the pauses between attempts to reach the storage.
        steps: the run's steps.
        journal: the run's journal. Only rank 0 writes it.
        active: counts the saves that are under way.
        retention: deletes superfluous steps; None on all ranks but rank 0.
        status: tells the other ranks which deletions rank 0 has finished.

    Raises:
        CheckpointError: the folder cannot be written, or the ranks do not all see the same folder.
    """

    def __init__(self, location: Location, process_group: dist.ProcessGroup | None, keep: Keep, timeout: timedelta):
        self._keep = keep
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1:
            self._group = Processes(process_group).new_group(timeout, f"opening {location}")
        self.processes = Processes(self._group, alone=self._group is None)
        self.closing = threading.Event()
        self.status = DeletionStatus(self.processes)
        self.steps = Steps(location, self.status.retired_steps, self.closing)
        self.journal = Journal(self.steps)
        self.active = ActiveSaves()
        require_shared_folder(self.steps, self.processes)
        self.retention: Retention | None = None
        if self.processes.rank == 0:
            self.retention = Retention(self.steps, keep, self.journal, self.active.steps, self.status.retired)

    def plan_retention(self) -> tuple[Verdict, ...]:
        """Return for every step whether it would be deleted now, and why. Deletes nothing."""
        return Verdicts(self.steps, self._keep, self.active.steps).plan()

    def wait_for_deletions(self, number: int) -> None:
        """Wait until the deletions after all saves up to a number have ended; on every rank.

        Args:
            number: the number of a save, as ``Schedule.begin`` returned it.

        Raises:
            CheckpointError: rank 0 has not finished in time.
        """
        if self.retention is not None:
            self.retention.wait()
        self.status.wait(number, self._timeout)

    def close(self) -> None:
        """Wait for the deletions under way, close the journal, and destroy the process group."""
        self.closing.set()
        if self.retention is not None:
            self.retention.close()
            self.journal.close()
            self.status.finished()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)

"""The processes that save together, beside whatever their training loops say to each other."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from torch_xla_ckpt import _dcp

# How often a process looks whether somebody calls the roll, and how long one waits for the answers, in seconds.
_LOOK = 1.0
_PATIENCE = 10.0


class Peers:
    """A process group of our own, and a way to find out who is gone when it fails.

    gloo tells that a connection is lost or that a wait was too long, not who is to blame. So whoever sees an error
    calls the roll through the store that torch.distributed was set up with, and a thread in every process answers,
    whatever the others of its threads are waiting for.

    Every process must create it at the same point of the program.

    Args:
        of: the processes. None: all.
        timeout: for one wait in a collective.
    """

    def __init__(self, of: dist.ProcessGroup | None, timeout: timedelta):
        self.instead_of = (None, of)
        self.group = _dcp.new_group(of, timeout)
        self.failed = False
        self._rank = dist.get_rank(self.group)
        self._ranks = dist.get_process_group_ranks(self.group)
        self._name = f"torch_xla_ckpt/{self.group.group_name}"
        self._store = _dcp.default_store()
        self._closed = threading.Event()
        threading.Thread(target=self._answer, name="SPMDStager-roll-call", daemon=True).start()

    def who_is_gone(self) -> str:
        """The ranks that do not answer, in words and in the default group's numbering; "" if all do."""
        self.failed = True
        deadline = time.monotonic() + _PATIENCE
        try:
            self._store.set(f"{self._name}/call", "1")
            while True:
                others = (n for n in range(len(self._ranks)) if n != self._rank)
                silent = [n for n in others if not self._store.check([f"{self._name}/{n}"])]
                if not silent:
                    return ""
                if time.monotonic() > deadline:
                    return f"rank {', '.join(str(self._ranks[n]) for n in silent)} is gone"
                self._closed.wait(_LOOK / 5)
        except RuntimeError as error:
            return f"rank 0 or the launcher is gone, with the store through which to ask who else ({error})"

    def close(self) -> None:
        """Leave. Does not wait for the others."""
        self._closed.set()
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _answer(self) -> None:
        try:
            while not self._closed.wait(_LOOK):
                if self._store.check([f"{self._name}/call"]):
                    self._store.set(f"{self._name}/{self._rank}", "1")
                    return
        except RuntimeError:
            return  # the store is gone, and with it whoever could call

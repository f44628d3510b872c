"""Leases: which saves in a folder may still be alive.

A save writes ``lease-<save id>.json`` before anything else, renews it while it runs, and removes it after the commit.
The lease names the process. On the same machine this shows whether the save has ended. On other machines, a save counts
as alive until its lease has not been renewed for ten minutes, by the clock of the storage.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Entry, Folder
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.file_names import lease_name, save_id_of_lease

logger = logging.getLogger(__name__)

RENEWAL = 60.0
"""Seconds between two renewals of a lease."""
EXPIRY = 600.0
"""Seconds after which a lease that was not renewed has expired."""

_LAST_RENEWAL = 5.0  # seconds to wait for a renewal under way when a lease ends

_held: set[str] = set()  # save ids of this process's leases

forks.in_child(_held.clear)


@dataclass(frozen=True)
class Holder:
    """A process, distinguished from every other process.

    Args:
        host: the name of its machine.
        boot: the id of the machine's current boot; "" if unknown.
        space: its namespace of process ids, which differs between containers; "" if unknown.
        pid: its process id.
        started: the time it started, in ticks since the boot; "" if unknown.
    """

    host: str
    boot: str
    space: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Holder:
        """Return this process."""
        boot = space = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            space = os.readlink("/proc/self/ns/pid")
        return cls(socket.gethostname(), boot, space, os.getpid(), _start_time(os.getpid()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Holder | None:
        """Return the process that a lease names; None if the lease is not whole."""
        try:
            fields = json.loads(data)
            holder = cls(**{name: fields[name] for name in cls.__dataclass_fields__})
        except (ValueError, LookupError, TypeError):
            return None
        texts = (holder.host, holder.boot, holder.space, holder.started)
        return holder if all(isinstance(text, str) for text in texts) and type(holder.pid) is int else None

    def to_bytes(self) -> bytes:
        """Return the content of a lease."""
        return json.dumps(asdict(self)).encode()

    def is_alive(self) -> bool | None:
        """Return whether the process still runs; None if this process cannot tell."""
        here = Holder.here()
        if not self.boot or not self.started or (self.boot, self.space) != (here.boot, here.space):
            return None
        return _start_time(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _start_time(pid: int) -> str:
    """Return the time a process started; "" if no such process runs."""
    try:
        # The name, in parentheses, may have spaces. State is the first field after it, the start time the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    is_ended = fields[0] in ("Z", "X")  # the process has ended, and its parent has not waited for it yet
    return "" if is_ended else fields[19]


class Lease:
    """The lease of one save of this process, renewed by a thread until it ends.

    Args:
        folder: the checkpoint's folder.
        save_id: the id of the save.

    Attributes:
        name: the name of the lease's file.
        is_removed: whether ``remove`` has removed the file.
    """

    def __init__(self, folder: Folder, save_id: str):
        self.name = lease_name(save_id)
        self._folder = folder
        self.save_id = save_id
        self.is_removed = False
        self._owner = forks.Owner()
        self._ended = threading.Event()
        self._renewed = _clock()
        try:
            folder.put(self.name, Holder.here().to_bytes())
        except BaseException:
            with suppress(Exception):
                folder.remove([self.name])
            raise
        _held.add(save_id)
        arguments = (weakref.ref(self), self._ended)
        self._thread = threading.Thread(target=_renew, args=arguments, name="torch_xla_ckpt-lease", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, save_id, self._ended, self._owner, self._thread)

    @property
    def is_here(self) -> bool:
        """Whether the save belongs to the running process; False in children forked from it."""
        return self._owner.is_here

    def require(self) -> None:
        """Check that no other program can have concluded that this save is dead.

        Raises:
            CheckpointError: the lease was not renewed for too long.
        """
        idle = _clock() - self._renewed
        if idle > EXPIRY / 2:
            raise CheckpointError(
                f"the save to {self._folder.url} was not committed: its lease was not renewed for {idle:.0f} s, so "
                "another program may have removed its files. The machine slept, or the storage did not answer. The "
                "previous checkpoint is untouched. Save again"
            )

    def end(self) -> None:
        """End the lease, whether the save was committed or failed. The lease's file stays, and is not renewed again."""
        _end(self.save_id, self._ended, self._owner, self._thread)

    def remove(self) -> None:
        """End the lease, and remove its file.

        Raises:
            OSError: the file is still there.
        """
        self.end()
        self._folder.remove([self.name])
        self.is_removed = True

    def renew(self) -> None:
        """Write the lease again. An error is logged; if it lasts, ``require`` raises."""
        began = _clock()
        try:
            self._folder.put(self.name, Holder.here().to_bytes())
        except Exception as error:
            logger.warning("the lease of a save to %s could not be renewed: %s", self._folder.url, error)
        else:
            self._renewed = began


def _renew(reference: weakref.ref[Lease], ended: threading.Event) -> None:
    while not ended.wait(RENEWAL):
        lease = reference()
        if lease is None:
            return
        lease.renew()
        del lease


def _end(save_id: str, ended: threading.Event, owner: forks.Owner, thread: threading.Thread) -> None:
    if owner.is_here:
        ended.set()
        _held.discard(save_id)
        if thread is not threading.current_thread():
            thread.join(_LAST_RENEWAL)


def _clock() -> float:
    """Return seconds of a clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def live_saves(folder: Folder, listing: Mapping[str, Entry], now: float | None) -> dict[str, Holder | None]:
    """Return the ids of saves that may be alive, each with its process; None where the lease is not readable.

    Args:
        folder: the checkpoint's folder.
        listing: the folder's files.
        now: the time by the storage's clock, in seconds; None if it has no clock, and then no lease has expired.
    """
    live: dict[str, Holder | None] = {}
    for save_id, (holder, is_alive) in _read_leases(folder, listing).items():
        if is_alive is None:
            modified = listing[lease_name(save_id)].modified
            is_alive = modified is None or now is None or now - modified < EXPIRY
        if is_alive:
            live[save_id] = holder
    return live


def ended_saves(folder: Folder, listing: Iterable[str]) -> set[str]:
    """Return the ids of saves that have certainly ended: their process ran on this machine, and has ended.

    Args:
        folder: the checkpoint's folder.
        listing: the names of the folder's files.
    """
    return {save_id for save_id, (_, is_alive) in _read_leases(folder, listing).items() if is_alive is False}


def _read_leases(folder: Folder, listing: Iterable[str]) -> dict[str, tuple[Holder | None, bool | None]]:
    """Return the process of each lease, by save id, and whether the save is alive; None if this machine cannot tell."""
    leases: dict[str, tuple[Holder | None, bool | None]] = {}
    for name in listing:
        save_id = save_id_of_lease(name)
        if save_id is None:
            continue
        try:
            holder = Holder.from_bytes(folder.read(name))
        except FileNotFoundError:
            continue  # the save has just ended
        # A save writes its lease before anything else, so a lease that is not whole comes from a process that died.
        is_alive = False if holder is None else holder.is_alive()
        if is_alive and holder == Holder.here():
            is_alive = save_id in _held
        leases[save_id] = holder, is_alive
    return leases

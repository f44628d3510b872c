"""Leases: which of the saves that have left files in a folder may still be alive.

A save writes ``lease-<save id>.json`` before anything else, renews it while it runs, and removes it after the commit.
The lease names the process. On the same machine that settles whether the save is over. Elsewhere a lease counts as
alive until it has not been renewed for ten minutes, by the clock of the storage.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Entry, Folder
from torch_xla_ckpt.runtime import forks

logger = logging.getLogger(__name__)

RENEWAL = 60.0
"""Seconds between two renewals of a lease."""
EXPIRY = 600.0
"""Seconds after which a lease that was not renewed is over."""

_LAST_RENEWAL = 5.0  # seconds that the end of a lease waits for a renewal that is under way

_NAME = re.compile(r"lease-([0-9a-f]{16})\.json")
_held: set[str] = set()  # save ids of this process's leases

forks.in_child(_held.clear)


def lease_name(save_id: str) -> str:
    return f"lease-{save_id}.json"


@dataclass(frozen=True)
class Holder:
    """A process, told apart from all others.

    Args:
        host: name of its machine.
        boot: the machine's current boot; "" where that is not known.
        space: its space of process numbers, which containers have of their own; "" where that is not known.
        pid: its process number.
        started: when it started, in ticks of that boot; "" where that is not known.
    """

    host: str
    boot: str
    space: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Holder:
        return _here(os.getpid())

    @classmethod
    def from_bytes(cls, data: bytes) -> Holder | None:
        """Read what a lease holds; None if it is not whole."""
        try:
            fields = json.loads(data)
            found = cls(**{name: fields[name] for name in cls.__dataclass_fields__})
        except (ValueError, LookupError, TypeError):
            return None
        texts = (found.host, found.boot, found.space, found.started)
        return found if all(isinstance(text, str) for text in texts) and type(found.pid) is int else None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def is_alive(self) -> bool | None:
        """Whether the process still runs; None if that cannot be told from here."""
        here = Holder.here()
        if not self.boot or not self.started or (self.boot, self.space) != (here.boot, here.space):
            return None
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@lru_cache(maxsize=1)
def _here(pid: int) -> Holder:
    boot = space = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.readlink("/proc/self/ns/pid")
    return Holder(socket.gethostname(), boot, space, pid, _started(pid))


def _started(pid: int) -> str:
    """When a process started; "" if there is none, or it has ended and nobody has asked how."""
    try:
        # The name, in parentheses, may have spaces. State is the first field after it, the start time the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


class Lease:
    """The lease of one save of this process.

    Args:
        folder: where the save writes.
        save_id: of the save.
    """

    def __init__(self, folder: Folder, save_id: str):
        self.name = lease_name(save_id)
        self._folder = folder
        self._save_id = save_id
        self._owner = forks.Owner()
        self._over = threading.Event()
        self._renewed = _clock()
        try:
            folder.put(self.name, Holder.here().to_bytes())
        except BaseException:
            with suppress(Exception):
                folder.remove([self.name])
            raise
        _held.add(save_id)
        renewing = (weakref.ref(self), self._over)
        self._thread = threading.Thread(target=_renew, args=renewing, name="torch_xla_ckpt-lease", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end, save_id, self._over, self._owner, self._thread)

    @property
    def is_here(self) -> bool:
        """Whether the save belongs to the running process; False in children forked from it."""
        return self._owner.is_here

    def require(self) -> None:
        """Show that no other program can have taken this save for dead.

        Raises:
            CheckpointError: the lease was not renewed for too long.
        """
        idle = _clock() - self._renewed
        if idle > EXPIRY / 2:
            raise CheckpointError(
                f"the save to {self._folder.url} was not committed: its lease was not renewed for {idle:.0f} s, so "
                "another program may have removed its files. The machine slept, or the storage did not answer. The "
                "checkpoint that was there before is untouched. Save again"
            )

    def end(self) -> None:
        """Say in this process that the save is over, well or not. The lease's file stays, and is not renewed again."""
        _end(self._save_id, self._over, self._owner, self._thread)

    def renew(self) -> None:
        """Write the lease anew. What goes wrong is logged, and shows in ``require`` if it lasts."""
        began = _clock()
        try:
            self._folder.put(self.name, Holder.here().to_bytes())
        except Exception as error:
            logger.warning("the lease of a save to %s could not be renewed: %s", self._folder.url, error)
        else:
            self._renewed = began


def _renew(reference: weakref.ref[Lease], over: threading.Event) -> None:
    while not over.wait(RENEWAL):
        lease = reference()
        if lease is None:
            return
        lease.renew()
        del lease


def _end(save_id: str, over: threading.Event, owner: forks.Owner, thread: threading.Thread) -> None:
    if owner.is_here:
        over.set()
        _held.discard(save_id)
        if thread is not threading.current_thread():
            thread.join(_LAST_RENEWAL)


def _clock() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def living(folder: Folder, listing: Mapping[str, Entry], now: float | None) -> dict[str, Holder | None]:
    """Return the saves that may be alive, by save id, with the process that makes each.

    Args:
        folder: where their files lie.
        listing: the files that are there.
        now: the storage's clock; None if it has none, and then no lease counts as expired.
    """
    found: dict[str, Holder | None] = {}
    for save_id, (holder, alive) in _known(folder, listing).items():
        if alive is None:
            modified = listing[lease_name(save_id)].modified
            alive = modified is None or now is None or now - modified < EXPIRY
        if alive:
            found[save_id] = holder
    return found


def ended(folder: Folder, listing: Mapping[str, Entry]) -> set[str]:
    """Return the ids of saves that are over without a doubt: their process was on this machine, and has ended."""
    return {save_id for save_id, (_, alive) in _known(folder, listing).items() if alive is False}


def _known(folder: Folder, listing: Iterable[str]) -> dict[str, tuple[Holder | None, bool | None]]:
    """The process of each lease, and whether its save is alive as far as that can be told on this machine."""
    found: dict[str, tuple[Holder | None, bool | None]] = {}
    for name in listing:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        try:
            holder = Holder.from_bytes(folder.read(name))
        except FileNotFoundError:
            continue  # the save has just ended
        # A lease is whole before its save writes anything else: one that is not was left by a process that died.
        alive = False if holder is None else holder.is_alive()
        if alive and holder == Holder.here():
            alive = match[1] in _held
        found[match[1]] = holder, alive
    return found

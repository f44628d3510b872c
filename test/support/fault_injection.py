"""Strikes at one of the operations with which a save touches files."""

import collections
import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

REFUSALS = {
    "makedirs": errno.EROFS,
    "create": errno.EROFS,
    "open": errno.EACCES,
    "write": errno.ENOSPC,
    "fsync": errno.EIO,
    "close": errno.EIO,
    "replace": errno.EACCES,
    "unlink": errno.EACCES,
}
KINDS = {
    "data": r"__\d+_\d+(-[0-9a-f]{16})?\.distcp",
    "manifest": r"manifest-[0-9a-f]{16}\.json",
    "lease": r"lease-[0-9a-f]{16}\.json",
    "temporary": r"(__\d+)?\.metadata-[0-9a-f]{16}\.tmp",
    "metadata": r"(__\d+)?\.metadata",
}


@dataclasses.dataclass(frozen=True)
class Note:
    """An operation that a process is about to do, or has done, or has done by half."""

    moment: str  # before, after, during
    verb: str
    kind: str
    number: int  # of this verb on this kind of file; the order of all of them differs between threads
    name: str

    def __str__(self):
        return f"{self.moment} {self.verb} {self.kind}"


@dataclasses.dataclass(frozen=True)
class Blow:
    """Which operation of which process is struck, at which moment, and how.

    Args:
        how: "kill" the process with SIGKILL, let the operation "fail" (a write when half of it is done), or
            "interrupt" the main thread as Ctrl-C does.
    """

    rank: int
    verb: str
    kind: str
    number: int
    moment: str
    how: str

    def hits(self, note):
        return (self.verb, self.kind, self.number, self.moment) == (note.verb, note.kind, note.number, note.moment)

    def strike(self, note):
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "interrupt":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        else:
            raise OSError(REFUSALS[note.verb], os.strerror(REFUSALS[note.verb]), note.name)


class Trap:
    """Stands in for ``os`` in ``storage/files.py``: notes every operation in a file, and strikes at one of them.

    Args:
        notes: the file.
        blow: what to strike.
        together: no data file is created before so many threads are about to. So all of them have their part in a
            save, and the operations are the same every time.
    """

    VERBS = ("makedirs", "open", "write", "fsync", "close", "replace", "unlink")

    def __init__(self, notes, blow=None, together=1):
        if blow is not None and blow.how == "interrupt":  # a script's background jobs start with SIGINT ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._blow = blow
        self._together = threading.Barrier(together)
        self._numbers = collections.defaultdict(itertools.count)
        self._opened = {}

    def __getattr__(self, name):
        real = getattr(os, name)
        return functools.partial(self._operate, name, real) if name in self.VERBS else real

    def _operate(self, verb, real, *args, **kwargs):
        target = args[1] if verb == "replace" else self._opened.get(args[0], args[0])
        if verb == "open" and args[1] & os.O_CREAT:
            verb = "create"
        elif verb == "open" and not os.path.isdir(target):  # a file that is only read
            return real(*args, **kwargs)
        name = Path(target).name
        kind = next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), "folder")
        if (verb, kind) == ("create", "data"):
            with contextlib.suppress(threading.BrokenBarrierError):
                self._together.wait(timeout=1)
        reach = functools.partial(self._reach, verb=verb, kind=kind, number=next(self._numbers[verb, kind]), name=name)
        reach("before", None if verb != "close" else lambda: real(*args))
        if verb == "write":
            reach("during", lambda: real(args[0], args[1][: len(args[1]) // 2]))
        result = real(*args, **kwargs)
        if verb in ("open", "create"):
            self._opened[result] = target
        reach("after")
        return result

    def _reach(self, moment, by_half=None, **operation):
        """Note the moment, and strike if this is the one."""
        note = Note(moment, **operation)
        hit = self._blow is not None and self._blow.hits(note)
        if hit and by_half and (moment == "during" or self._blow.how == "fail"):
            by_half()
        if hit or moment != "during":
            os.write(self._notes, json.dumps(dataclasses.astuple(note)).encode() + b"\n")
        if hit:
            self._blow.strike(note)


def read_notes(path):
    return [Note(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


class Audit:
    """Files of a folder that this process creates, renames and removes, from Python itself."""

    EVENTS = {"open": "create", "os.rename": "replace", "os.remove": "unlink"}  # noqa: RUF012

    def __init__(self, folder):
        self._folder = str(folder)
        self.seen = []
        sys.addaudithook(self._hook)

    def _hook(self, event, args):
        if event in self.EVENTS and isinstance(args[0], (str, os.PathLike)):
            path = os.fspath(args[0])
            if os.path.dirname(path) == self._folder and (event != "open" or args[2] & os.O_CREAT):
                self.seen.append(self.EVENTS[event])

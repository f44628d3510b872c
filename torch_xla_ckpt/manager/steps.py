"""The steps of a run: a folder for each, named by its number.

What is committed is decided by reading ``.metadata``, never by a listing, because listings can lag behind writes.
Whether a step is damaged is decided by its content. An error of access says nothing about a step: it is retried, and
then raised.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError, UnsafeObjectError
from torch_xla_ckpt.manager.facts import KEY, Facts, facts_of
from torch_xla_ckpt.manager.keep import Saved
from torch_xla_ckpt.protocols import Folder, Window
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import Location, is_checkpoint_file, leftovers, open_folder, read_index, written_by

__all__ = ["KEY", "Found", "Steps"]

logger = logging.getLogger(__name__)

# torch_xla's manager writes this last; it is a pickle, and never opened.
_THEIRS = ".manager_metadata"
_NUMBER = re.compile(r"0|[1-9][0-9]*")
# The last line of our ``.metadata``: save id, checksum of the manifest, checksum of all before.
_SEAL = re.compile(rb"\ntorch_xla_ckpt ([0-9a-f]{16}) [0-9a-f]{16} [0-9a-f]{16}\n\Z")
_TAIL = 128  # bytes at the end of ``.metadata`` that surely hold the seal
_THREADS = 16  # requests at a time, on remote stores
_ATTEMPTS = 3
_PAUSE = 0.5  # seconds before the second attempt; longer before later ones

Kind = Literal["committed", "unfinished", "foreign", "damaged"]
T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """What the folder of a step is.

    Args:
        kind: "unfinished" has no ``.metadata``: a save that goes on or broke off, or the rest of a deletion.
            "committed" is a checkpoint, whoever wrote it. "damaged" is one of ours or of torch_xla's manager whose
            ``.metadata`` cannot be read. "foreign" has a ``.metadata`` that is no checkpoint's.
        save_id: the save that committed it; None if another program's writer did.
        flaw: of a damaged step, what is wrong.
        is_theirs: torch_xla's manager wrote it.
    """

    kind: Kind
    save_id: str | None = None
    flaw: str | None = None
    is_theirs: bool = False


@dataclass
class _Known:
    """What is remembered of a step, as long as ``found`` stays true."""

    found: Found
    stamp: object
    facts: Facts | None = None
    is_whole: bool = False
    damage: str | None = None


@dataclass
class _Memory:
    """What is remembered of a run. Its size is bounded by the number of folders in the last listing."""

    known: dict[int, _Known] = field(default_factory=dict)
    # Committed by this program and not deleted since. A listing that lags may lack them.
    own: set[int] = field(default_factory=set)
    numbers: set[int] | None = None  # of folders; None before the first listing
    reported: set[int] = field(default_factory=set)  # foreign ones


class Steps:
    """The steps below a path.

    Methods that are named in the past tense take note of what this program did itself, and make no request.

    Args:
        location: the run's folder.
        retired: returns the steps that another rank has deleted, whatever is remembered of them here.
        closed: ends the pauses between attempts when it is set.
    """

    def __init__(
        self,
        location: Location,
        retired: Callable[[], Iterable[int]] = tuple,
        closed: threading.Event | None = None,
    ):
        self.location = location
        self._retired = retired
        self._closed = closed or threading.Event()
        self._memory = _Memory()
        self._renew()
        forks.renew_in_child(self, Steps._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    @property
    def root(self) -> Folder:
        """The run's folder itself."""
        return open_folder(self.location, sync=False)

    @property
    def damaged(self) -> Mapping[int, str]:
        """The steps that were found to be damaged, with what is wrong."""
        with self._lock:
            known = dict(self._memory.known)
        flaws = {step: one.damage or one.found.flaw for step, one in sorted(known.items())}
        return {step: flaw for step, flaw in flaws.items() if flaw is not None}

    def at(self, step: int) -> Location:
        """Where a step lies."""
        return self.location.child(str(step))

    def folder(self, step: int) -> Folder:
        return open_folder(self.at(step), sync=False)

    # Which steps there are.

    def numbers(self) -> list[int]:
        """The numbers of all folders that are named like a step, ascending, whatever they are. One listing."""
        retired = set(self._retired())
        with self._lock:
            before = set(self._memory.own)
        names = self.tried(lambda: self.root.folders(), "listing the steps")
        listed = {int(name) for name in names if _NUMBER.fullmatch(name)}
        with self._lock:
            memory = self._memory
            memory.own -= retired
            # Steps that were committed or deleted while the listing was made are as ``own`` has them.
            memory.numbers = (listed - (before - memory.own)) | memory.own
            # What the listing lacks may have been deleted by another program, so it has to be looked at again.
            doubtful = retired | (memory.own - listed)
            memory.known = {n: one for n, one in memory.known.items() if n in memory.numbers and n not in doubtful}
            memory.reported &= memory.numbers
            return sorted(memory.numbers)

    def believed(self) -> list[int]:
        """As ``numbers``, from memory if there was a listing. What other programs add or remove since is missed."""
        with self._lock:
            numbers = self._memory.numbers
            if numbers is not None:
                kinds = {n: one.found.kind for n, one in self._memory.known.items()}
                return sorted(n for n in numbers if kinds.get(n, "committed") == "committed")
        return self.numbers()

    def is_known(self, step: int) -> bool:
        with self._lock:
            return step in self._memory.known

    def committed(self) -> list[int]:
        """The committed steps that are not known to be damaged, ascending. What is foreign is reported once.

        One listing, and one or two requests for each folder that is not known yet.
        """
        looks = self.looks(self.numbers())
        damaged = self.damaged
        return [step for step, found in looks.items() if found.kind == "committed" and step not in damaged]

    def latest(self, numbers: Iterable[int] | None = None) -> int | None:
        """The newest committed step that is not known to be damaged.

        Args:
            numbers: of the folders there are. Default: they are listed.
        """
        for step in sorted(self.numbers() if numbers is None else numbers, reverse=True):
            if self.look(step, fresh=True).kind == "committed" and step not in self.damaged:
                return step
        return None

    def looks(self, numbers: Collection[int]) -> dict[int, Found]:
        """What each of these folders is; remote ones are looked at side by side."""
        return dict(zip(numbers, self.each(self.look, numbers)))

    def look(self, step: int, *, fresh: bool = False) -> Found:
        """What the folder of a step is.

        Args:
            step: its number.
            fresh: ask the store, also where the answer is remembered.
        """
        with self._lock:
            known = self._memory.known.get(step)
        try:
            stamp = self.tried(lambda: self._stamp(step), f"looking at step {step}")
        except FileNotFoundError:
            return self._take_note(step, Found("unfinished"), None)
        if known is not None and (known.stamp == stamp if stamp is not None else not fresh):
            return known.found
        found = self.tried(lambda: self._probe(step), f"looking at step {step}")
        return self._take_note(step, found, stamp)

    def each(self, function: Callable[[int], T], numbers: Collection[int]) -> list[T]:
        """Call a function for each number, in threads where that saves time."""
        if not self.root.remote or len(numbers) < 2:
            return [function(number) for number in numbers]
        with ThreadPoolExecutor(min(_THREADS, len(numbers)), thread_name_prefix="CheckpointManager-look") as threads:
            return list(threads.map(function, numbers))

    # What a step holds.

    def facts(self, step: int) -> Facts:
        """What the manifest of a committed step tells. It is read once.

        Raises:
            FileNotFoundError: the step is not committed, or was deleted just now.
            CorruptCheckpointError, UnsafeObjectError: it is damaged.
            CheckpointError: it cannot be read, for another reason.
        """
        found = self.look(step)
        if found.kind in ("unfinished", "foreign"):
            raise FileNotFoundError(f"{self.at(step)} holds no commit")
        if found.kind == "damaged":
            raise CorruptCheckpointError(found.flaw or "")
        with self._lock:
            known = self._memory.known.get(step)
        if known is not None and known.facts is not None:
            return known.facts
        if found.save_id is None:  # stock DCP keeps no facts, and torch_xla's manager none that can be read safely
            facts = Facts(Saved(step), {}, found.is_theirs)
        else:
            manifest = self._confirmed(
                lambda: read_index(self.folder(step)).manifest, f"reading the manifest of step {step}"
            )
            facts = Facts(Saved(step), {}) if manifest is None else facts_of(step, manifest)
            if manifest is not None and manifest.save_id != found.save_id:  # it was saved again meanwhile
                self._take_note(step, Found("committed", manifest.save_id), self._stamp(step))
        self._learn(step, facts=facts)
        return facts

    def flaw(self, step: int, *, thorough: bool = False) -> str | None:
        """Why a committed step cannot be restored, as far as that shows without reading its data.

        Args:
            step: its number.
            thorough: look at its files again, also where they were all there before.

        Raises:
            FileNotFoundError: the step is not committed, or was deleted just now.
            CheckpointError: that cannot be told, because the store does not answer.
        """
        found = self.look(step, fresh=thorough)
        with self._lock:
            known = self._memory.known.get(step)
        if known is not None and known.damage is not None:
            return known.damage
        if known is not None and known.is_whole and not thorough:
            return None
        try:
            files = self.facts(step).files
            missing = self._missing(step, files)
        except (CorruptCheckpointError, IncompleteCheckpointError, UnsafeObjectError) as error:
            flaw: str | None = str(error)
        else:
            flaw = f"{', '.join(missing[:3])} is missing or too short" if missing else None
        if flaw is not None and self.look(step, fresh=True) != found:  # it was deleted or saved again meanwhile
            return self.flaw(step, thorough=thorough)
        self._learn(step, is_whole=flaw is None, damage=flaw)
        return flaw

    # What this program does.

    def saved(self, step: int, save_id: str | None = None, facts: Facts | None = None) -> None:
        """This program has committed a step.

        Args:
            step: its number.
            save_id, facts: of the save, where this process knows them.
        """
        with self._lock:
            self._memory.own.add(step)
            self._memory.known.pop(step, None)
            if self._memory.numbers is not None:
                self._memory.numbers.add(step)
        if save_id is not None:
            with suppress(OSError):
                self._take_note(step, Found("committed", save_id), self._stamp(step))
                self._learn(step, facts=facts, is_whole=True)

    def found_damaged(self, step: int, flaw: str) -> None:
        """A step could not be restored, because of what it holds."""
        with suppress(CheckpointError):
            self.look(step)
        self._learn(step, damage=flaw)

    def retire(self, step: int) -> None:
        """Delete the commit of a step: from then on it is no step any more. Its files stay.

        Raises:
            OSError: the commit is still there.
        """
        folder = self.folder(step)
        folder.remove([METADATA])
        with self._lock:
            self._memory.known.pop(step, None)
        if self.look(step, fresh=True).kind != "unfinished":
            raise OSError(f"{self.at(step)}/{METADATA} is still there after it was deleted")

    def clear(self, step: int, files: Collection[str] = (), *, stock: bool = False) -> bool:
        """Delete the files of a step that has no commit. Files that are not ours stay, and then the folder does too.

        So do files of a save that may be alive, also if another program makes it.

        Args:
            step: its number.
            files: that are known to be its own; others are found by listing the folder.
            stock: it was written by stock DCP, whose data files look all alike.

        Returns:
            Whether the folder is gone.

        Raises:
            OSError: some files are still there, or the step is committed again.
        """
        folder = self.folder(step)
        listing = folder.listing()
        ours = leftovers(folder, listing, None) | frozenset(files) | ({_THEIRS} & listing.keys())
        if stock:
            ours |= {name for name in listing if is_checkpoint_file(name) and not is_checkpoint_file(name, stock=False)}
        # Only now: a save that has ended its lease meanwhile, and so counts as over, has committed the step.
        if self.look(step, fresh=True).kind != "unfinished":
            raise OSError(f"{self.at(step)} is committed, so its files stay")
        self._delete(folder, ours)
        if listing.keys() - ours:
            return False
        self._remove_folder(step)
        with self._lock:
            if self._memory.numbers is not None:
                self._memory.numbers.discard(step)
        return True

    def remove_litter(self, step: int) -> bool:
        """Delete what saves or deletions of ours have left, if there is nothing else in the folder.

        Files of a save that may be alive stay, also if another program makes it.

        Returns:
            Whether there was such.
        """
        folder = self.folder(step)
        names = folder.names()
        if not names or not all(is_checkpoint_file(name, stock=False) for name in names):
            return False
        clock = f"{METADATA}-{secrets.token_hex(8)}.tmp"  # a name that counts as litter if it should stay
        folder.put(clock, b"")
        try:
            listing = folder.listing()
        finally:
            folder.remove([clock])
        entry = listing.pop(clock, None)
        over = leftovers(folder, listing, None if entry is None else entry.modified)
        if not over or self.look(step, fresh=True).kind != "unfinished":
            return False
        self._delete(folder, over)
        if not listing.keys() - over:
            self._remove_folder(step)
        return True

    # How.

    def tried(self, action: Callable[[], T], doing: str) -> T:
        """Call a function that makes requests, again if the store does not answer.

        Raises:
            FileNotFoundError: what was asked for is not there.
            CheckpointError: the store does not answer, or a checkpoint is damaged.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return action()
            except (FileNotFoundError, CheckpointError):
                raise
            except Exception as error:
                if attempt == _ATTEMPTS or self._closed.is_set():
                    raise CheckpointError(
                        f"{doing} of {self.location} failed {attempt} times, so it is not known what is there: "
                        f"{type(error).__name__}: {error}. Try again when the storage answers"
                    ) from error
                logger.info("%s of %s failed, and is tried again: %s", doing, self.location, error)
                self._closed.wait(_PAUSE * attempt)
        raise AssertionError

    def _confirmed(self, action: Callable[[], T], doing: str) -> T:
        """As ``tried``. What seems damaged is read twice, because a broken connection can look like damage."""
        try:
            return self.tried(action, doing)
        except CorruptCheckpointError:
            return self.tried(action, doing)

    def _stamp(self, step: int) -> object:
        """A value that changes with ``.metadata`` on local disks; None elsewhere.

        Raises:
            FileNotFoundError: there is none, on a local disk.
        """
        if not self.location.is_local:
            return None
        try:
            status = os.stat(os.path.join(self.at(step).path, METADATA))
        except NotADirectoryError as error:
            raise FileNotFoundError(str(error)) from error
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _probe(self, step: int) -> Found:
        folder = self.folder(step)
        try:
            save_id = _sealed_by(folder)
            if save_id is not None:
                return Found("committed", save_id)
            return self._unsealed(step, folder)
        except (FileNotFoundError, NotADirectoryError):
            return Found("unfinished")
        except IsADirectoryError:
            return Found("foreign")

    def _unsealed(self, step: int, folder: Folder) -> Found:
        """A folder whose ``.metadata`` does not end with our seal: another writer's, or a damaged one."""
        names = folder.names()
        ours = any(is_checkpoint_file(name, stock=False) for name in names)
        try:
            found = self._confirmed(lambda: read_index(folder), f"reading step {step}")
        except (CorruptCheckpointError, UnsafeObjectError) as error:
            return Found("damaged", None, str(error)) if ours or _THEIRS in names else Found("foreign")
        if found.manifest is not None:  # it has just been replaced
            return Found("committed", found.manifest.save_id)
        if written_by(found.metadata):
            return Found("damaged", None, "its manifest is missing, and the line that leads to it is damaged")
        return Found("committed", is_theirs=_THEIRS in names)

    def _missing(self, step: int, files: Mapping[str, int]) -> list[str]:
        """Which data files are not there or too short. A listing may lag, so each is asked for by its name."""
        folder = self.folder(step)
        absent = self.tried(lambda: folder.missing(files), f"listing the files of step {step}")
        return [
            name
            for name in absent
            if self.tried(lambda name=name: _size(folder, name), f"looking at {name} in step {step}") != files[name]  # type: ignore[misc]
        ]

    def _take_note(self, step: int, found: Found, stamp: object) -> Found:
        report = False
        with self._lock:
            memory = self._memory
            known = memory.known.get(step)
            if found.kind == "unfinished":
                memory.known.pop(step, None)
                memory.own.discard(step)
            elif known is None or known.found != found or known.stamp != stamp:
                memory.known[step] = _Known(found, stamp)
            if found.kind == "foreign" and step not in memory.reported:
                memory.reported.add(step)
                report = True
        if report:
            logger.warning(
                "%s has a .metadata that is not a checkpoint's, so it is no step, and is left alone",
                self.at(step),
            )
        return found

    def _learn(
        self, step: int, *, facts: Facts | None = None, is_whole: bool | None = None, damage: str | None = None
    ) -> None:
        with self._lock:
            known = self._memory.known.get(step)
            if known is not None:
                known.facts = facts or known.facts
                known.is_whole = known.is_whole if is_whole is None else is_whole
                known.damage = damage or known.damage

    def _delete(self, folder: Folder, names: Collection[str]) -> None:
        """Delete files, manifests last: they show that the other files belong to a save that is over.

        Raises:
            OSError: some are still there.
        """
        folder.remove(sorted(name for name in names if not name.startswith("manifest-")))
        folder.remove(sorted(name for name in names if name.startswith("manifest-")))

    def _remove_folder(self, step: int) -> None:
        """Remove a folder that is empty now; what cannot be removed is no step.

        Of a link to a folder only the link goes: where it leads is not ours.
        """
        location = self.at(step)
        if location.filesystem is None:
            with suppress(OSError):  # somebody has put something in it
                if not os.path.islink(location.path):
                    os.rmdir(location.path)
                elif not os.listdir(location.path):
                    os.unlink(location.path)
        elif not location.is_object_store:
            with suppress(Exception):
                location.filesystem.rmdir(location.path)


def _sealed_by(folder: Folder) -> str | None:
    """The save id in the seal of ``.metadata``; None if there is no seal. Reads a few bytes.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
    """
    size = folder.size(METADATA)
    start = max(size - _TAIL, 0)
    if not size:
        return None
    (tail,) = folder.view([Window(METADATA, start, size, ((start, size),))])
    match = _SEAL.search(bytes(tail))
    return None if match is None else match[1].decode()


def _size(folder: Folder, name: str) -> int | None:
    try:
        return folder.size(name)
    except FileNotFoundError:
        return None

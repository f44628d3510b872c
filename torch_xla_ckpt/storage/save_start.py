"""The start of a save: its lease, the version of ``.metadata`` that it found, and the files that it will replace.

A save removes only files that were there when it began: the saves that wrote them cannot commit any more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Entry, Folder, Version
from torch_xla_ckpt.reports import BEGIN, Timeline
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage.cancellation import is_cancelled, wait_for_any
from torch_xla_ckpt.storage.deadline import GivenUp
from torch_xla_ckpt.storage.deadline import start as start_call
from torch_xla_ckpt.storage.file_names import carries_any, metadata_name, ranks_metadata, replaceable
from torch_xla_ckpt.storage.lease import Lease, ended_saves, live_saves
from torch_xla_ckpt.storage.seal import sealed_save_id

logger = logging.getLogger(__name__)


class Survey(NamedTuple):
    """The files that a save found when it began.

    Args:
        ranks_own: for a save of all ranks, the versions of the metadata files that single ranks wrote in saves without
            collectives; else empty.
        replaced: the files that the commit makes superfluous.
    """

    ranks_own: Mapping[str, Version]
    replaced: frozenset[str]


@dataclass
class SaveStart:
    """The state of a folder when a save began. Made by ``begin``.

    Args:
        version: the version of ``.metadata``. The save commits only if this version is still there.
        lease: the lease, which tells other programs that the save is alive.
        survey: the future of the survey. In a store, data files are written while the folder is still being listed.
        is_committing: whether a request to put ``.metadata`` may have been made. Default: False.
    """

    version: Version
    lease: Lease
    survey: Future[Survey]
    is_committing: bool = False


class Beginning:
    """A save that begins. In a store, that takes requests, which are made in other threads.

    Args:
        folder: the checkpoint's folder.
        save_id: the id of the save.
        rank: the rank of a save without collectives; None for a save of all ranks.
        version: the future of ``find_version``; None for a folder on a local disk.
        timeline: records how long it takes.
    """

    def __init__(
        self, folder: Folder, save_id: str, rank: int | None, version: Future[Version] | None, timeline: Timeline
    ):
        def begin_save() -> SaveStart:
            with timeline.span(BEGIN):
                return begin(folder, save_id, rank, version)

        self._owner = forks.Owner()
        self._version = version
        self._start: Future[SaveStart] = Future()
        if version is None:
            self._start.set_result(begin_save())
        else:
            self._start = start_call(begin_save)

    @property
    def is_here(self) -> bool:
        """Whether the save belongs to the running process; False in children forked from it."""
        return self._owner.is_here

    def wait_for_version(self) -> None:
        """Wait until data files may be written: until the version of ``.metadata`` is known.

        Raises:
            Exception: what ``find_version`` raised, or ``begin`` until now.
        """
        if self._version is not None:
            self._version.result()
        if self._start.done():
            self._start.result()

    def wait(self) -> SaveStart:
        """Wait until the save has begun. The manifest is written after that.

        Raises:
            Exception: what ``begin`` raised.
        """
        return self._start.result()

    def wait_to_clean_up(self) -> SaveStart:
        """Do the same after a failure. In ``clean_up``, stop waiting when its time is up.

        Raises:
            Exception: what ``begin`` raised.
            GivenUp: the time is up. The next save removes the lease.
        """
        while not self._start.done():
            wait_for_any([self._start], None)
            if is_cancelled():
                raise GivenUp
        return self._start.result()


def find_version(folder: Folder, rank: int | None) -> Version:
    """Return the version of ``.metadata``, which no earlier request of this process replaces any more.

    The version must be known before any data file is written. So a program that lists a data file, and commits later,
    knows that the save of this file cannot commit any more.

    Args:
        folder: the checkpoint's folder.
        rank: the rank of a save without collectives; None for a save of all ranks.

    Raises:
        CheckpointError: an earlier request that got no answer may still replace ``.metadata``.
    """
    folder.settle()
    return folder.version(metadata_name(rank))


def begin(folder: Folder, save_id: str, rank: int | None, version: Future[Version] | None) -> SaveStart:
    """Begin a save: take its lease, and record which files there are.

    Files that a save could still commit are never removed. Only leftovers are, if their process is known to have ended.

    The lease is there before the manifest: a manifest without a lease is that of a committed save.

    Args:
        folder: the checkpoint's folder.
        save_id: the id of the save.
        rank: the rank of a save without collectives; None for a save of all ranks.
        version: the future of ``find_version`` in a store; None for a folder on a local disk.

    Raises:
        CheckpointError: the folder holds a checkpoint of all ranks, and one rank would save there without collectives,
            where no reader would see its checkpoint. Or an earlier request that got no answer may still replace
            ``.metadata``.
    """
    lease = Lease(folder, save_id)
    try:
        if version is not None and rank is None:
            found = version.result()
            return SaveStart(found, lease, start_call(lambda: _survey(folder, folder.listing(), found, lease)))
        listing = folder.listing()
        if rank is not None and METADATA in listing:
            raise CheckpointError(
                f"{folder.url} holds a checkpoint of all ranks, and readers would not see what rank {rank} saves there "
                "without collectives. Save without collectives into another folder"
            )
        # Local leftovers are removed at once. So the version is read after the listing: a save that has committed since
        # is not taken for a leftover.
        found = find_version(folder, rank) if version is None else version.result()
        survey: Future[Survey] = Future()
        survey.set_result(_survey(folder, listing, found, lease, rank))
    except BaseException:
        with suppress(Exception):
            lease.remove()
        raise
    return SaveStart(found, lease, survey)


def _survey(
    folder: Folder, listing: Mapping[str, Entry], version: Version, lease: Lease, rank: int | None = None
) -> Survey:
    """Return which files of a listing matter to the save that has the lease."""
    ranks_own = {} if rank is not None else {name: folder.version(name) for name in ranks_metadata(listing)}
    return Survey(ranks_own, frozenset(_replaced(folder, listing, version, ranks_own, rank, lease)))


def _replaced(
    folder: Folder,
    listing: Mapping[str, Entry],
    version: Version,
    ranks_own: Collection[str],
    rank: int | None,
    lease: Lease,
) -> set[str]:
    """Return the files to remove after the commit, and remove those that can go now."""
    committed_id = sealed_save_id(version.end)
    present = replaceable(listing, rank) | set(ranks_own)
    if committed_id is not None:
        present |= {name for name in listing if committed_id in name}
    now = listing[lease.name].modified if lease.name in listing else None
    others = {name: entry for name, entry in listing.items() if name != lease.name}
    alive = live_saves(folder, others, now)
    if alive:
        logger.warning(
            "another save to %s seems to be under way, by %s. The first save to commit wins, and the other one fails",
            folder.url,
            ", ".join(str(holder or "an unknown process") for holder in alive.values()),
        )
    replaced = {name for name in present if not carries_any(name, {lease.save_id, *alive})}
    # A remote store may still carry out requests of a dead process, so there nothing is removed before the commit.
    if not folder.remote and (not version.exists or committed_id) and not ranks_own:
        dead = ended_saves(folder, others) - {committed_id}
        replaced -= _removed(folder, sorted(name for name in replaced if carries_any(name, dead)))
    return replaced


def _removed(folder: Folder, names: Sequence[str]) -> set[str]:
    """Remove leftovers and return those that are gone. An error is only logged: the next save tries again."""
    try:
        folder.remove(names)
    except OSError as error:
        logger.warning("leftovers in %s could not be removed (%s: %s)", folder.url, type(error).__name__, error)
        return set()
    return set(names)

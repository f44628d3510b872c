"""Begin, commit and finish a save, so that a folder always holds the old checkpoint or the new one, whole.

A save writes its data files, then its manifest, and then replaces ``.metadata`` in one step. This step is the commit,
because readers begin with ``.metadata``. Only after the commit does the save remove the files of the previous save. So
whenever a save breaks off, all files that ``.metadata`` leads to are there.

Two programs may save to one folder. The commit compares and swaps: it succeeds only if ``.metadata`` is the version
that the save found when it began. So the first of two overlapping saves to commit wins. A save removes only files that
were there when it began: the saves that wrote them cannot commit any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from torch_xla_ckpt.errors import CheckpointError, ConcurrentSaveError
from torch_xla_ckpt.protocols import Bytes, Entry, Folder, Version
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage.checkpoint_index import read_index
from torch_xla_ckpt.storage.deadline import start as start_call
from torch_xla_ckpt.storage.deadline import together
from torch_xla_ckpt.storage.file_errors import FileChanged
from torch_xla_ckpt.storage.file_names import (
    carries_any,
    is_checkpoint_file,
    manifest_name,
    metadata_name,
    rank_of_metadata,
    ranks_metadata,
    replaceable,
    save_id_of_lease,
    temporary_name,
)
from torch_xla_ckpt.storage.lease import Lease, ended_saves, live_saves
from torch_xla_ckpt.storage.manifest import Manifest
from torch_xla_ckpt.storage.pieces import joined_pieces, whole
from torch_xla_ckpt.storage.seal import SealedPieces, sealed_save_id

logger = logging.getLogger(__name__)

_LOOKS = 3  # attempts to see a file that was just put
_COMMITS = 3  # attempts to put .metadata into a store that keeps only a part of it


class Survey(NamedTuple):
    """The files that a save found when it began.

    Args:
        ranks_own: for a save of all ranks, the versions of the metadata files that single ranks wrote in saves without
            collectives; else empty.
        replaced: the files that the commit makes superfluous.
    """

    ranks_own: Mapping[str, Version]
    replaced: frozenset[str]


@dataclass(frozen=True)
class SaveStart:
    """The state of a folder when a save began. Made by ``begin``.

    Args:
        version: the version of ``.metadata``. The save commits only if this version is still there.
        lease: the lease, which tells other programs that the save is alive.
        survey: the future of the survey. In a store, data files are written while the folder is still being listed.
    """

    version: Version
    lease: Lease
    survey: Future[Survey]


class Beginning:
    """A save that begins, in another thread if its files are in a store.

    Args:
        begin: begins the save.
        later: call ``begin`` in another thread, and return before it has ended.
    """

    def __init__(self, begin: Callable[[], SaveStart], *, later: bool):
        self._owner = forks.Owner()
        self._start: Future[SaveStart] = Future()
        if later:
            self._start = start_call(begin)
        else:
            self._start.set_result(begin())

    @property
    def is_here(self) -> bool:
        """Whether the save belongs to the running process; False in children forked from it."""
        return self._owner.is_here

    def wait(self) -> SaveStart:
        """Wait until the save has begun.

        Raises:
            Exception: what ``begin`` raised.
        """
        return self._start.result()


def begin(folder: Folder, save_id: str, rank: int | None = None) -> SaveStart:
    """Begin a save: take its lease, and record which files there are.

    Files that a save could still commit are never removed. Only leftovers are, if their process is known to have ended.

    The version of ``.metadata`` is known before any data file is written. So a program that lists a data file, and
    commits later, knows that the save of this file cannot commit any more.

    Args:
        folder: the checkpoint's folder.
        save_id: the id of the save.
        rank: the rank of a save without collectives. Default: a save of all ranks.

    Raises:
        CheckpointError: the folder holds a checkpoint of all ranks, and one rank would save there without collectives,
            where no reader would see its checkpoint. Or an earlier request that got no answer may still replace
            ``.metadata``.
    """
    folder.settle()
    name = metadata_name(rank)
    asked = start_call(lambda: folder.version(name)) if folder.remote else None
    lease = Lease(folder, save_id)
    try:
        if asked is not None and rank is None:
            version = asked.result()
            return SaveStart(version, lease, start_call(lambda: _survey(folder, folder.listing(), version, lease)))
        listing = folder.listing()
        if rank is not None and METADATA in listing:
            raise CheckpointError(
                f"{folder.url} holds a checkpoint of all ranks, and readers would not see what rank {rank} saves there "
                "without collectives. Save without collectives into another folder"
            )
        # Local leftovers are removed at once. So the version is read after the listing: a save that has committed since
        # is not taken for a leftover.
        found = folder.version(name) if asked is None else asked.result()
        survey: Future[Survey] = Future()
        survey.set_result(_survey(folder, listing, found, lease, rank))
    except BaseException:
        lease.end()
        with suppress(Exception):
            folder.remove([lease.name])
        raise
    return SaveStart(found, lease, survey)


def _survey(
    folder: Folder, listing: Mapping[str, Entry], version: Version, lease: Lease, rank: int | None = None
) -> Survey:
    """Return which files of a listing matter to the save that has the lease."""
    ranks_own = {} if rank is not None else {name: folder.version(name) for name in ranks_metadata(listing)}
    return Survey(ranks_own, frozenset(_replaced(folder, listing, version, ranks_own, rank, lease)))


def publish(
    folder: Folder,
    save_id: str,
    files: Mapping[str, int],
    manifest: Iterable[Bytes],
    pickled: Iterable[Bytes],
    rank: int | None = None,
    *,
    start: SaveStart | None = None,
) -> None:
    """Write the manifest and commit a save whose data files are written.

    Args:
        folder: the checkpoint's folder.
        save_id: the id of the save.
        files: the size in bytes of each data file, by name.
        manifest: the bytes of the manifest, in pieces.
        pickled: DCP's metadata, pickled, in pieces.
        rank: the rank of a save without collectives. Default: a save of all ranks.
        start: the state of the folder when the save began. Default: replace whatever is there.

    Raises:
        ConcurrentSaveError: another program has committed here since the save began.
        CheckpointError: files of this save are missing, so nobody could load the checkpoint.
    """
    if start is not None:
        start.lease.require()
        folder.settle()
    name, temporary, own = metadata_name(rank), temporary_name(rank, save_id), manifest_name(save_id)
    # Nobody reads the manifest before the commit, so a store gets it during the last checks.
    late = list(joined_pieces(manifest)) if start is not None and folder.remote else None
    if late is None:
        size, manifest_checksum = _write_manifest(folder, own, joined_pieces(manifest))
        files = {**files, own: size}
    else:
        manifest_checksum = _checksum(late)
    data = SealedPieces(pickled, save_id, manifest_checksum)
    try:
        if start is None:
            folder.replace(name, data, temporary)
        elif late is None:
            _replace_local(folder, data, temporary, files, rank, start)
        else:
            _replace_remote(folder, data, temporary, files, rank, start, lambda: _put_manifest(folder, own, late))
    except FileChanged as error:
        # A request that is made again, because its answer was lost, finds what it has written itself.
        if not data.is_at(folder.version(name).end):
            raise _lost_to_another(folder, rank) from error


def _write_manifest(folder: Folder, name: str, pieces: Iterable[Bytes]) -> tuple[int, bytes]:
    """Write the manifest, and return its size in bytes and its checksum."""
    hasher, size = xxhash.xxh3_64(), 0
    sink = folder.create(name, unchanged=True)
    try:
        for piece in pieces:
            hasher.update(piece)
            size += len(piece)
            sink.write(piece)
        sink.close()
    except BaseException:
        sink.abandon()
        raise
    folder.flush()
    return size, hasher.digest()


def _put_manifest(folder: Folder, name: str, pieces: Iterable[Bytes]) -> None:
    """Write the manifest to a store.

    Raises:
        CheckpointError: the store has kept only a part of it.
    """
    size, _ = _write_manifest(folder, name, pieces)
    if not folder.refuses_parts and (kept := _size_in_store(folder, name)) != size:
        raise CheckpointError(
            f"the checkpoint was not committed: {folder.url} has kept {kept} of {size} bytes of {name}, although it "
            "called the put a success. Save again"
        )


def _size_in_store(folder: Folder, name: str) -> int:
    """Return the size of a file that was just put; 0 if there is none.

    fsspec's backends look into the last listing of a folder. Another thread's may be from before the put.
    """
    for _ in range(_LOOKS):
        with suppress(FileNotFoundError):
            return folder.size(name)
    return 0


def _checksum(pieces: Iterable[Bytes]) -> bytes:
    hasher = xxhash.xxh3_64()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def finish(folder: Folder, save_id: str, start: SaveStart) -> None:
    """Remove the files that a commit has made superfluous.

    The saves that wrote them began with a ``.metadata`` that is replaced now, so they cannot commit any more. Errors
    are only logged, because the new checkpoint is safe.
    """
    start.lease.end()
    try:
        old = {name for name in start.survey.result().replaced if save_id not in name}
        folder.remove([*sorted(old), start.lease.name])
        # The saves whose leases went may have begun uploads as well. Saves that began after this one may be alive.
        dead = {dead_id for name in old if (dead_id := save_id_of_lease(name)) is not None}
        if dead:
            folder.abort_uploads(lambda name: is_checkpoint_file(name, stock=False) and carries_any(name, dead))
    except Exception as error:
        logger.warning(
            "the checkpoint in %s is saved, but files of an older one could not be removed (%s: %s). The next save "
            "tries again",
            folder.url,
            type(error).__name__,
            error,
        )


def withdraw(folder: Folder, save_id: str, start: SaveStart, rank: int | None = None) -> None:
    """Remove the files of a save that failed, unless the save is committed all the same.

    A remote store may still carry out a put whose answer was lost. So there the files stay until the next save, unless
    another save has committed.
    """
    start.lease.end()
    version = folder.version(metadata_name(rank))
    if sealed_save_id(version.end) == save_id:
        folder.remove([start.lease.name])
    elif not folder.remote or not version.is_same(start.version):
        own = {name for name in folder.names() if save_id in name and is_checkpoint_file(name, stock=False)}
        folder.remove([*sorted(own - {start.lease.name}), start.lease.name])


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


def _replace_local(
    folder: Folder, data: SealedPieces, temporary: str, files: Mapping[str, int], rank: int | None, start: SaveStart
) -> None:
    """Replace ``.metadata`` on a local disk after the last checks: the commit.

    Args:
        folder: the checkpoint's folder.
        data: the new bytes of ``.metadata``, in pieces.
        temporary: the name of the temporary file.
        files: the files of the save, with their sizes in bytes.
        rank: the rank of a save without collectives.
        start: the state of the folder when the save began.
    """
    _require_files(folder, files, folder.names(), start, rank)

    def check() -> None:  # the folder is locked by now, so a second listing is exact
        _require_no_other_save(folder, folder.names(), start, rank)

    folder.replace(metadata_name(rank), data, temporary, expected=start.version, check=check)


def _replace_remote(
    folder: Folder,
    data: SealedPieces,
    temporary: str,
    files: Mapping[str, int],
    rank: int | None,
    start: SaveStart,
    write_manifest: Callable[[], object],
) -> None:
    """Replace ``.metadata`` in a store after the last checks: the commit.

    Args:
        folder, data, temporary, rank, start: as for a local disk.
        files: the data files of the save, with their sizes in bytes.
        write_manifest: writes the manifest. It runs at the same time as the checks.
    """

    def check_files() -> None:
        listed = folder.listing()
        _require_files(folder, files, listed, start, rank)
        _require_no_other_save(folder, listed, start, rank)

    def check() -> None:
        together([write_manifest, check_files])

    name, content = metadata_name(rank), whole(data)
    expected = start.version
    for _ in range(_COMMITS):
        folder.replace(name, [content], temporary, expected=expected, check=check)
        if folder.refuses_parts or _size_in_store(folder, name) == len(content):
            return
        expected = folder.version(name)
        if sealed_save_id(expected.end) is not None:  # another save has committed after this one
            return
    raise CheckpointError(
        f"{folder.url} has kept only a part of {name} in {_COMMITS} attempts, although it called each put a success. "
        "There is no checkpoint now. The other files of the checkpoint before it were not removed. Mend the store, and "
        "save again"
    )


def _require_files(
    folder: Folder, files: Mapping[str, int], listed: Collection[str], start: SaveStart, rank: int | None
) -> None:
    """Check that this process sees all files of a save: files of other processes, and files that somebody may remove.

    Raises:
        ConcurrentSaveError: another program has committed here since, and may have removed files.
        CheckpointError: some files are missing, so nobody could load the checkpoint.
    """
    missing = folder.missing(files, listed)
    if not missing:
        return
    if not folder.version(metadata_name(rank)).is_same(start.version):
        raise _lost_to_another(folder, rank)
    raise CheckpointError(
        f"the checkpoint was not committed: {', '.join(missing[:5])} cannot be seen whole by the coordinator in "
        f"{folder.url}. All processes must write to one shared folder. If this is one, its file system shows new files "
        "late, or somebody removed them during the save. Save again"
    )


def _require_no_other_save(folder: Folder, listed: Collection[str], start: SaveStart, rank: int | None) -> None:
    """Check that saves of all ranks and saves without collectives do not overlap in one folder.

    Raises:
        ConcurrentSaveError: the other kind of save has committed here; the error names that save.
    """
    if rank is not None:
        if folder.version(METADATA).exists:
            raise _lost_to_another(folder, None)
        return
    ranks_own = start.survey.result().ranks_own
    for name in sorted(ranks_metadata(listed)):
        before = ranks_own.get(name)
        if before is None or not folder.version(name).is_same(before):
            raise _lost_to_another(folder, rank_of_metadata(name))


def _lost_to_another(folder: Folder, rank: int | None) -> ConcurrentSaveError:
    """Return the error that names the save which committed first."""
    try:
        manifest = read_index(folder, rank).manifest
        other = "another program's save" if manifest is None else _describe(manifest)
    except FileNotFoundError:
        other = f"another program, which removed {metadata_name(rank)}"
    except CheckpointError:
        other = "another program's save, which cannot be read"
    return ConcurrentSaveError(
        f"{folder.url} was changed while this save ran, by {other}. This save was not committed, and the other one is "
        "untouched. Let only one program at a time save to a path. If the other one is an old job that has not ended, "
        "end it, and save again"
    )


def _describe(manifest: Manifest) -> str:
    step = "" if manifest.step is None else f" of step {manifest.step}"
    writer = f" by {manifest.writer}" if manifest.writer else ""
    return f"save {manifest.save_id}{step}{writer}, committed at {manifest.time}"

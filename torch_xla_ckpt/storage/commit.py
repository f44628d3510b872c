"""How a checkpoint becomes visible, how it is found, and how it is replaced.

Every file of a save carries the save's id in its name, except ``.metadata``. A save writes its data files, then its
manifest, and then replaces ``.metadata`` in one step, which is the commit: readers begin there. Only then are the files
of the save before it removed. So whenever a save breaks off, ``.metadata`` belongs to files that are all there.

Two programs may save to one folder. The commit compares and swaps: it succeeds only if ``.metadata`` is what it was
when the save began. So of two saves that overlap, the one that commits first wins. A save removes only files that were
there when it began: the saves that wrote them cannot commit any more.

Behind DCP's pickle, where ``pickle.load`` does not look, ``.metadata`` ends with a line that names the save id and
holds the checksums of the pickle and of the manifest. It binds the two together, and lets our reader leave the pickle
alone.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.errors import (
    CheckpointError,
    ConcurrentSaveError,
    CorruptCheckpointError,
    Damage,
    ReplacedCheckpointError,
    UnsafeObjectError,
)
from torch_xla_ckpt.protocols import Entry, Folder, Version
from torch_xla_ckpt.serialization import METADATA, read_metadata
from torch_xla_ckpt.storage.files import NOT_A_FILE, TRANSIT, FileChanged, NotAFile
from torch_xla_ckpt.storage.lease import Lease, ended, lease_name, living
from torch_xla_ckpt.storage.manifest import Manifest
from torch_xla_ckpt.storage.stored import checksum

logger = logging.getLogger(__name__)

_OURS = re.compile(
    r"__\d+_\d+-[0-9a-f]{16}\.distcp|(?:manifest|lease)-[0-9a-f]{16}\.json|(?:__\d+)?\.metadata-[0-9a-f]{16}\.tmp"
)
_ID = re.compile(r"(?<=-)[0-9a-f]{16}(?=\.)")
_UNLEASED = 3600.0  # seconds without a write after which a save of an older version counts as over
_READS = 100  # of a checkpoint that is replaced again and again
_STOCK = re.compile(r"__\d+_\d+\.distcp")
_METADATA = re.compile(r"(?:__\d+)?\.metadata")
_SEAL = re.compile(rb"\ntorch_xla_ckpt ([0-9a-f]{16}) ([0-9a-f]{16}) ([0-9a-f]{16})\n")
_SEAL_BYTES = len("\ntorch_xla_ckpt \n") + 3 * 16 + 2
_OWN_BYTES = 16 + len("\n")  # the checksum of all that comes before it


def new_save_id() -> str:
    return secrets.token_hex(8)


def data_name(rank: int, number: int, save_id: str) -> str:
    return f"__{rank}_{number}-{save_id}.distcp"


def manifest_name(save_id: str) -> str:
    return f"manifest-{save_id}.json"


def is_part(name: str, *, stock: bool = True) -> bool:
    """Whether a file is data, a manifest or a temporary file of a checkpoint: ours, or also stock DCP's."""
    return bool(_OURS.fullmatch(name) or (stock and _STOCK.fullmatch(name)))


def metadata_name(rank: int | None) -> str:
    """``.metadata``, or the one of a rank that saves by itself (DCP without collectives)."""
    return METADATA if rank is None else f"__{rank}{METADATA}"


@dataclass(frozen=True)
class Committed:
    """What a folder's ``.metadata`` leads to.

    Args:
        metadata: DCP's. From the manifest its ``storage_data`` maps to ``Stored``, else it is as it was pickled.
        manifest: None for checkpoints that others wrote.
        version: a checksum of the bytes of ``.metadata``.
    """

    metadata: Metadata
    manifest: Manifest | None
    version: bytes


def publish(
    folder: Folder, manifest: Manifest, pickled: bytes, rank: int | None = None, *, start: Start | None = None
) -> None:
    """Commit a save whose data files are written.

    Args:
        folder: where.
        manifest, pickled: what the checkpoint holds, for the two files that say so.
        rank: of a process that saves by itself.
        start: what the save began from. Without it, whatever is there is replaced.

    Raises:
        ConcurrentSaveError: another program has saved here since.
        CheckpointError: files of this save are not there, so nobody could load it.
    """
    if start is not None:
        start.lease.require()
        folder.settle()
    sealed = manifest.to_bytes()
    sink = folder.create(manifest_name(manifest.save_id))
    try:
        sink.write(sealed)
        sink.close()
    except BaseException:
        sink.abandon()
        raise
    folder.flush()
    data = pickled + f"\ntorch_xla_ckpt {manifest.save_id} {checksum(sealed).hex()} ".encode()
    name = metadata_name(rank)
    data += checksum(data).hex().encode() + b"\n"
    temporary = f"{name}-{manifest.save_id}.tmp"
    try:
        if start is None:
            folder.replace(name, data, temporary)
        else:
            listed = folder.names()
            files = {**manifest.files, manifest_name(manifest.save_id): len(sealed)}
            _require_files(folder, files, listed, start, rank)

            def look() -> None:  # a local folder is locked by then, so that a second listing makes this exact
                _require_no_others(folder, listed if folder.remote else folder.names(), start, rank)

            folder.replace(name, data, temporary, expected=start.version, look=look)
    except FileChanged as error:
        # A request that is made again, because its answer was lost, finds what it has written itself.
        if not folder.version(name).is_same(Version.of(data)):
            raise _lost_to_another(folder, rank) from error


def committed(folder: Folder, rank: int | None = None, *, verify: bool = True) -> Committed:
    """The checkpoint that a folder holds.

    Args:
        folder: where.
        rank: the rank whose own metadata is wanted, of a save without collectives.
        verify: refuse metadata and manifests that do not fit their checksums. Without it whichever of the two can be
            read is taken.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        CorruptCheckpointError: ``.metadata`` or the manifest is not what was written.
        UnsafeObjectError: ``.metadata`` names something that could run code.
    """
    try:
        return _found(folder, rank, verify)
    except (CorruptCheckpointError, UnsafeObjectError) as first:
        if not folder.remote:
            raise
        found = _found(folder, rank, verify)
        logger.warning(TRANSIT, folder.url, first)
        return found


def _found(folder: Folder, rank: int | None, verify: bool) -> Committed:
    name = metadata_name(rank)
    for _ in range(_READS):
        try:
            data = folder.read(name)
        except (NotAFile, IsADirectoryError) as error:
            raise _corrupt(name, b"", NOT_A_FILE) from error
        found = _committed(folder, name, data, verify)
        if found is not None:
            return found
    raise ReplacedCheckpointError(
        f"the checkpoint in {folder.url} was replaced {_READS} times while its manifest was read. Save less often, or "
        "read a checkpoint that is not being replaced"
    )


def version_of(folder: Folder, rank: int | None = None) -> bytes | None:
    """Return the checksum of what ``.metadata`` holds now; None if it is not there, b"" if it is not a file."""
    try:
        return checksum(folder.read(metadata_name(rank)))
    except FileNotFoundError:
        return None
    except (NotAFile, IsADirectoryError):
        return b""


def _committed(folder: Folder, name: str, data: bytes, verify: bool) -> Committed | None:
    """What ``.metadata`` leads to; None if a newer save has replaced it meanwhile."""
    seal = _seal(data)
    if seal is None or not seal.fits:
        return _unsealed(folder, name, data, seal, verify)
    where = manifest_name(seal.save_id)
    sealed = b""
    try:
        sealed = folder.read(where)
        if checksum(sealed) == seal.manifest:
            return _with_manifest(Manifest.from_bytes(sealed), seal.pickled, name, data)
        problem = f"it does not fit {name}"
    except FileNotFoundError:
        problem = "it is missing"
    except (NotAFile, IsADirectoryError):
        problem = NOT_A_FILE
    except ValueError as error:
        problem = str(error)
    if folder.read(name) != data:
        return None
    if verify:
        raise _corrupt(where, sealed, problem)
    logger.warning("%s in %s is damaged (%s); as verify=False, it is read without", where, folder.url, problem)
    return Committed(read_metadata(seal.pickled, name), None, checksum(data))


def _with_manifest(manifest: Manifest, pickled: bytes, name: str, data: bytes) -> Committed:
    if manifest.planner_data_is_pickled:
        try:
            manifest.metadata.planner_data = read_metadata(pickled, name).planner_data
        except CheckpointError as error:
            logger.warning("what the planner that saved it recorded is left out: %s", error)
    return Committed(manifest.metadata, manifest, checksum(data))


def _unsealed(folder: Folder, name: str, data: bytes, seal: _Seal | None, verify: bool) -> Committed:
    """A checkpoint whose ``.metadata`` does not end with a line that fits: another writer's, or a damaged one."""
    if seal is not None and verify:
        raise _corrupt(name, data, "it does not fit its checksum")
    ids: list[str] = [] if seal is None else [seal.save_id]
    metadata = failure = None
    try:
        metadata = read_metadata(data if seal is None else seal.pickled, name)
        by = written_by(metadata)
        ids += [by] if by else []
    except CheckpointError as error:
        failure = error
    names = folder.names()
    for save_id in ids:
        if manifest_name(save_id) in names:
            if verify:
                raise _corrupt(name, data, "the line that leads to its manifest is damaged")
            with suppress(ValueError, NotAFile, IsADirectoryError):
                return _with_manifest(Manifest.from_bytes(folder.read(manifest_name(save_id))), data, name, data)
    if failure is not None:
        raise failure
    assert metadata is not None
    if ids:
        logger.warning(
            "%s in %s was written by torch_xla_ckpt, but its manifest is gone: nothing that is read can be checked. "
            "Restore from another checkpoint if there is one",
            name,
            folder.url,
        )
    return Committed(metadata, None, checksum(data))


def written_by(metadata: Metadata) -> str | None:
    """The id of the save that wrote this, if it was one of ours; stock DCP's are longer."""
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return save_id if isinstance(save_id, str) and re.fullmatch("[0-9a-f]{16}", save_id) else None


@dataclass(frozen=True)
class _Seal:
    """The last line of ``.metadata``: whose it is, the checksum of its manifest, and whether it fits what precedes."""

    pickled: bytes
    save_id: str
    manifest: bytes
    fits: bool


def _seal(data: bytes) -> _Seal | None:
    match = _SEAL.fullmatch(data, max(len(data) - _SEAL_BYTES, 0))
    if match is None:
        return None
    fits = checksum(data[:-_OWN_BYTES]).hex().encode() == match[3]
    return _Seal(data[:-_SEAL_BYTES], match[1].decode(), bytes.fromhex(match[2].decode()), fits)


@dataclass(frozen=True)
class Start:
    """What a save found in its folder when it began. Made by ``begin``.

    Args:
        version: of ``.metadata``. The save is committed only if it still is this one.
        others: versions of the metadata that ranks saved by themselves, if this is a save of all ranks.
        replaced: files that the commit makes superfluous.
        lease: tells other programs that the save is alive.
    """

    version: Version
    others: Mapping[str, Version]
    replaced: frozenset[str]
    lease: Lease


def begin(folder: Folder, save_id: str, rank: int | None = None) -> Start:
    """Begin a save: take its lease, and look at what is there.

    Nothing that could still be committed is removed: only files of saves whose process is known to have ended.

    Raises:
        CheckpointError: a rank would save by itself into the checkpoint of all ranks, and no reader would see it; or a
            request of an earlier save, given up on, may still replace ``.metadata``.
    """
    folder.settle()
    lease = Lease(folder, save_id)
    try:
        listing = folder.listing()
        version = folder.version(metadata_name(rank))
        ranks_own = {name: folder.version(name) for name in _others(listing, rank)}
        if rank is not None and METADATA in listing:
            raise CheckpointError(
                f"{folder.url} holds a checkpoint of all ranks, which readers prefer to what one rank saves by itself. "
                "Save without collectives into another folder"
            )
        there = _of_checkpoints(listing, rank, stock=rank is None) | _others(listing, rank)
        there |= {name for name in listing if _belongs(name, {_save_id_of(version) or "/"})}
        now = listing[lease.name].modified if lease.name in listing else None
        others = {name: entry for name, entry in listing.items() if name != lease.name}
        alive = living(folder, others, now)
        if alive:
            logger.warning(
                "another save to %s seems to be under way, by %s. The one that commits first wins, and the other fails",
                folder.url,
                ", ".join(str(holder or "an unknown process") for holder in alive.values()),
            )
        spared = {save_id, *alive}
        removable = {name for name in there if not _belongs(name, spared)}
        # Remote stores may still carry out requests of a dead process, so there nothing goes before the commit.
        if not folder.remote and (not version.exists or _save_id_of(version)) and not _others(listing, rank):
            over = ended(folder, others) - {_save_id_of(version)}
            leftovers = sorted(name for name in removable if _belongs(name, over))
            removable.difference_update(_removed(folder, leftovers))
    except BaseException:
        _end(folder, lease)
        raise
    return Start(version, ranks_own, frozenset(removable), lease)


def _removed(folder: Folder, names: Sequence[str]) -> Sequence[str]:
    """Remove leftovers; returns those that are gone. What goes wrong is logged: the next save tries again."""
    try:
        folder.remove(names)
    except OSError as error:
        logger.warning("leftovers in %s could not be removed (%s: %s)", folder.url, type(error).__name__, error)
        return ()
    return names


def _others(listing: Iterable[str], rank: int | None) -> set[str]:
    """The metadata of ranks that saved by themselves, which a save of all ranks replaces."""
    return set() if rank is not None else {name for name in listing if _METADATA.fullmatch(name)} - {METADATA}


def _end(folder: Folder, lease: Lease) -> None:
    """End a lease whose save has left no files."""
    lease.end()
    with suppress(Exception):
        folder.remove([lease.name])


def _save_id_of(version: Version) -> str | None:
    match = _SEAL.fullmatch(version.end, max(len(version.end) - _SEAL_BYTES, 0))
    return None if match is None else match[1].decode()


def _belongs(name: str, save_ids: Collection[str]) -> bool:
    return any(save_id in name for save_id in save_ids)


def finish(folder: Folder, save_id: str, start: Start) -> None:
    """After a commit: remove the files that it made superfluous.

    Whoever wrote them began from a ``.metadata`` that is replaced now, and cannot commit any more. The new checkpoint
    is safe, so what goes wrong here is only logged.
    """
    start.lease.end()
    old = {name for name in start.replaced if save_id not in name}
    try:
        folder.remove([*sorted(old), start.lease.name])
        over = {name.removeprefix("lease-").removesuffix(".json") for name in old if name.startswith("lease-")}
        if over:  # these saves may have begun uploads as well; those that began after this one may be alive
            folder.abort_uploads(lambda name: is_part(name, stock=False) and _belongs(name, over))
    except Exception as error:
        logger.warning(
            "the checkpoint in %s is saved, but files of an older one could not be removed (%s: %s). The next save "
            "tries again",
            folder.url,
            type(error).__name__,
            error,
        )


def withdraw(folder: Folder, save_id: str, start: Start, rank: int | None = None) -> None:
    """After a save that failed: remove what its processes wrote, unless it is committed all the same.

    A remote store may still carry out a put whose answer was lost, so there it is left to the next save, unless another
    save was committed instead.
    """
    start.lease.end()
    version = folder.version(metadata_name(rank))
    if _save_id_of(version) == save_id:
        folder.remove([start.lease.name])
    elif not folder.remote or not version.is_same(start.version):
        own = {name for name in folder.names() if save_id in name and is_part(name, stock=False)}
        folder.remove([*sorted(own - {start.lease.name}), start.lease.name])


def _require_files(
    folder: Folder, files: Mapping[str, int], listed: Collection[str], start: Start, rank: int | None
) -> None:
    """Show that all files of a save can be seen from here: those of other processes, and that nobody removed some.

    Raises:
        ConcurrentSaveError: another program has saved here since, and may have removed files.
        CheckpointError: some cannot be seen, so nobody could load the checkpoint.
    """
    missing = folder.missing(files, listed)
    if not missing:
        return
    if not folder.version(metadata_name(rank)).is_same(start.version):
        raise _lost_to_another(folder, rank)
    raise CheckpointError(
        f"the checkpoint was not committed: {', '.join(missing[:5])} cannot be seen whole in {folder.url} from the "
        "coordinator. All processes must write to one shared folder; if this is one, its file system shows new files "
        "late, or somebody has removed them while the save ran. Save again"
    )


def _require_no_others(folder: Folder, listed: Collection[str], start: Start, rank: int | None) -> None:
    """Show that no rank has saved by itself since a save of all ranks began, nor the other way round.

    Raises:
        ConcurrentSaveError: naming the other save.
    """
    if rank is not None:
        if folder.version(METADATA).exists:
            raise _lost_to_another(folder, None)
        return
    for name in sorted(_others(listed, rank)):
        before = start.others.get(name)
        if before is None or not folder.version(name).is_same(before):
            raise _lost_to_another(folder, int(name.removeprefix("__").removesuffix(METADATA)))


def _lost_to_another(folder: Folder, rank: int | None) -> ConcurrentSaveError:
    try:
        manifest = committed(folder, rank).manifest
        other = "another program's save" if manifest is None else _describe(manifest)
    except FileNotFoundError:
        other = f"another program, which removed {metadata_name(rank)}"
    except CheckpointError:
        other = "another program's save, which cannot be read"
    return ConcurrentSaveError(
        f"{folder.url} was changed while this save ran, by {other}. This save was not committed and the other is "
        "untouched. Let only one program at a time save to a path: if the other one is an old job that has not ended, "
        "end it, and save again"
    )


def _describe(manifest: Manifest) -> str:
    step = "" if manifest.step is None else f" of step {manifest.step}"
    writer = f" by {manifest.writer}" if manifest.writer else ""
    return f"save {manifest.save_id}{step}{writer}, committed at {manifest.time}"


def over(folder: Folder, listing: Mapping[str, Entry], now: float | None) -> frozenset[str]:
    """Return those files of a folder without a commit that no save will need any more.

    Files of saves that may be alive are not among them. A save without a lease is one of an older version of this
    package: it may be alive until it has written its manifest, or nothing for an hour.

    Args:
        folder: where.
        listing: its files.
        now: the storage's clock, in seconds; None if it has none.
    """
    alive = set(living(folder, listing, now))
    parts: dict[str, list[str]] = {}
    for name in listing:
        match = _ID.search(name) if is_part(name, stock=False) else None
        if match is not None:
            parts.setdefault(match[0], []).append(name)
    for save_id, names in parts.items():
        if not {lease_name(save_id), manifest_name(save_id)}.intersection(names):
            times = [modified for name in names if (modified := listing[name].modified) is not None]
            if len(times) < len(names) or now is None or now - max(times) < _UNLEASED:
                alive.add(save_id)
    return frozenset(name for save_id, names in parts.items() if save_id not in alive for name in names)


def _of_checkpoints(names: Iterable[str], rank: int | None, *, stock: bool) -> set[str]:
    """Those of ``names`` that are data, manifests, leases or temporary files of ours, or also data of stock DCP."""
    return {
        name for name in names if (_OURS.fullmatch(name) and _is_own(name, rank)) or (stock and _STOCK.fullmatch(name))
    }


def _is_own(name: str, rank: int | None) -> bool:
    """Whether a save may see to this file; a rank that saves by itself has only its own."""
    return rank is None or name.startswith((f"__{rank}_", f"__{rank}."))


def _corrupt(name: str, data: bytes, what: str) -> CorruptCheckpointError:
    damage = Damage(name, 0, len(data), (), what)
    return CorruptCheckpointError(
        f"{name} is not what was written: {what}. Restore from another checkpoint, or load with verify=False to take "
        "what can be read",
        [damage],
    )

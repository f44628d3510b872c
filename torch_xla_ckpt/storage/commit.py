"""How a checkpoint becomes visible, how it is found, and how it is replaced.

Every file of a save carries the save's id in its name, except ``.metadata``. A save writes its data files, then its
manifest, and then replaces ``.metadata`` in one step, which is the commit: readers begin there. Only then are the files
of the save before it removed. So whenever a save breaks off, ``.metadata`` belongs to files that are all there.

Behind DCP's pickle, where ``pickle.load`` does not look, ``.metadata`` ends with a line that names the save id and
holds the checksums of the pickle and of the manifest. It binds the two together, and lets our reader leave the pickle
alone.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError, Damage
from torch_xla_ckpt.storage.files import Folder
from torch_xla_ckpt.storage.manifest import Manifest, checksum
from torch_xla_ckpt.storage.unpickle import METADATA, read_metadata

logger = logging.getLogger(__name__)

_OURS = re.compile(
    r"(?:__\d+_\d+-[0-9a-f]{16}\.distcp|manifest-[0-9a-f]{16}\.json|(?:__\d+)?\.metadata-[0-9a-f]{16}\.tmp)"
)
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
    """

    metadata: Metadata
    manifest: Manifest | None


def publish(folder: Folder, manifest: Manifest, pickled: bytes, rank: int | None = None) -> None:
    """Commit a save whose data files are written."""
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
    folder.replace(name, data + checksum(data).hex().encode() + b"\n", f"{name}-{manifest.save_id}.tmp")


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
    name = metadata_name(rank)
    data = folder.read(name)
    seal = _seal(data)
    if seal is None or not seal.fits:
        return _unsealed(folder, name, data, seal, verify)
    where = manifest_name(seal.save_id)
    sealed = b""
    try:
        sealed = folder.read(where)
        if checksum(sealed) == seal.manifest:
            return _with_manifest(Manifest.from_bytes(sealed), seal.pickled, name)
        problem = f"it does not fit {name}"
    except FileNotFoundError:
        problem = "it is missing"
    except ValueError as error:
        problem = str(error)
    if folder.read(name) != data:  # a newer save has just replaced what was begun to be read
        return committed(folder, rank, verify=verify)
    if verify:
        raise _corrupt(where, sealed, problem)
    logger.warning("%s in %s is damaged (%s); as verify=False, it is read without", where, folder.url, problem)
    return Committed(read_metadata(seal.pickled, name), None)


def _with_manifest(manifest: Manifest, pickled: bytes, name: str) -> Committed:
    if manifest.planner_data_is_pickled:
        try:
            manifest.metadata.planner_data = read_metadata(pickled, name).planner_data
        except CheckpointError as error:
            logger.warning("what the planner that saved it recorded is left out: %s", error)
    return Committed(manifest.metadata, manifest)


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
            with suppress(ValueError):
                return _with_manifest(Manifest.from_bytes(folder.read(manifest_name(save_id))), data, name)
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
    return Committed(metadata, None)


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


def remove_leftovers(folder: Folder, rank: int | None = None) -> set[str]:
    """Before a save: remove files of earlier saves that broke off, so that they cannot fill the disk.

    Returns:
        The files of what is there now, which the next commit replaces.

    Raises:
        CheckpointError: a rank would save by itself into the checkpoint of all ranks, and no reader would see it.
    """
    folder.abort_uploads(lambda name: bool(_OURS.fullmatch(name)) and _is_own(name, rank))
    names = set(folder.names())
    holders = {name for name in names if _METADATA.fullmatch(name)}
    if rank is not None and METADATA in holders:
        raise CheckpointError(
            f"{folder.url} holds a checkpoint of all ranks, which readers prefer to what one rank saves by itself. "
            "Save without collectives into another folder"
        )
    if rank is not None:
        holders &= {metadata_name(rank)}
    try:
        needed = {holder: _needed(folder, holder, names) for holder in holders}
    except CheckpointError as error:
        logger.warning(
            "what lies in %s is kept until the next commit, because it cannot be read: %s", folder.url, error
        )
        return set()
    in_use = set().union(*needed.values())
    # Beside a checkpoint of stock DCP, files named as its are may be what it is just about to commit.
    ours = holders == {METADATA} and _seal(folder.read(METADATA)) is not None
    try:
        folder.remove(sorted(_of_checkpoints(names, rank, stock=ours) - in_use))
    except OSError as error:
        logger.warning("leftovers in %s could not be removed (%s: %s)", folder.url, type(error).__name__, error)
    return needed.get(metadata_name(rank), set()) if rank is not None else in_use | (holders - {METADATA})


def remove_replaced(folder: Folder, save_id: str, before: Collection[str], rank: int | None = None) -> None:
    """After a commit: remove the save that it replaced.

    The new checkpoint is safe by now, so what goes wrong here is only logged.
    """
    try:
        names = set(folder.names())
        old = _of_checkpoints(names, rank, stock=rank is None) | (names & set(before))
        folder.remove(sorted(name for name in old if save_id not in name))
    except Exception as error:
        logger.warning(
            "the checkpoint in %s is saved, but files of an older one could not be removed (%s: %s). The next save "
            "tries again",
            folder.url,
            type(error).__name__,
            error,
        )


def withdraw(folder: Folder, save_id: str, files: Collection[str], rank: int | None = None) -> None:
    """After a save that failed: remove what it wrote, unless it is committed all the same.

    An object store may still carry out a put whose answer was lost, so there it is left to the next save.
    """
    if folder.remote:
        return
    try:
        seal = _seal(folder.read(metadata_name(rank)))
        committed = seal is not None and seal.save_id == save_id
    except FileNotFoundError:
        committed = False
    if not committed:
        folder.remove([*files, manifest_name(save_id), f"{metadata_name(rank)}-{save_id}.tmp"])


def _of_checkpoints(names: Collection[str], rank: int | None, *, stock: bool) -> set[str]:
    """Those of ``names`` that are data, manifests or temporary files of ours, or also data of stock DCP."""
    return {
        name for name in names if (_OURS.fullmatch(name) and _is_own(name, rank)) or (stock and _STOCK.fullmatch(name))
    }


def _is_own(name: str, rank: int | None) -> bool:
    """Whether a save may see to this file; a rank that saves by itself has only its own."""
    return rank is None or name.startswith((f"__{rank}_", f"__{rank}."))


def _needed(folder: Folder, holder: str, names: Collection[str]) -> set[str]:
    """Those of ``names`` that the checkpoint of this ``.metadata`` consists of.

    Raises:
        CheckpointError: that cannot be told.
    """
    data = folder.read(holder)
    seal = _seal(data)
    if seal is not None:
        if not seal.fits:
            raise _corrupt(holder, data, "it does not fit its checksum")
        return {name for name in names if seal.save_id in name}
    metadata = read_metadata(data, holder)
    if written_by(metadata):
        raise _corrupt(holder, data, "the line that leads to its manifest is damaged")
    stored = metadata.storage_data
    places = stored.values() if isinstance(stored, dict) else ()
    named = {name for place in places if isinstance(name := getattr(place, "relative_path", None), str)}
    # Never a file that only claims to be part of a checkpoint.
    return {name for name in named & set(names) if _STOCK.fullmatch(name) or _OURS.fullmatch(name)}


def _corrupt(name: str, data: bytes, what: str) -> CorruptCheckpointError:
    damage = Damage(name, 0, len(data), (), what)
    return CorruptCheckpointError(
        f"{name} is not what was written: {what}. Restore from another checkpoint, or load with verify=False to take "
        "what can be read",
        [damage],
    )

"""Reading a checkpoint's index: ``.metadata`` and the manifest that belongs to it.

A reader begins with ``.metadata``. Its seal leads to the manifest and holds the manifest's checksum. A save may replace
the checkpoint between the two reads; then the reader begins again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    Damage,
    ReplacedCheckpointError,
    UnsafeObjectError,
)
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.serialization import read_metadata
from torch_xla_ckpt.storage.file_errors import NOT_A_FILE, TRANSIT, NotAFile
from torch_xla_ckpt.storage.file_names import manifest_name, metadata_name
from torch_xla_ckpt.storage.manifest import Manifest
from torch_xla_ckpt.storage.seal import Seal, read_seal
from torch_xla_ckpt.storage.stored import checksum

logger = logging.getLogger(__name__)

_READS = 100  # attempts to read a checkpoint that other saves replace again and again


@dataclass(frozen=True)
class CheckpointIndex:
    """The items of a committed checkpoint, and where they are stored.

    Args:
        metadata: DCP's metadata. With a manifest, ``storage_data`` maps every item to its ``Stored``; without one,
            ``storage_data`` is what the pickle holds.
        manifest: the manifest; None for checkpoints of other writers.
        version: a checksum of the bytes of ``.metadata``.
        texts: the texts under ``__metadata__`` of safetensors files. Default: none.
    """

    metadata: Metadata
    manifest: Manifest | None
    version: bytes
    texts: Mapping[str, str] = field(default_factory=dict)


def read_index(folder: Folder, rank: int | None = None, *, verify: bool = True) -> CheckpointIndex:
    """Return the index of the checkpoint in a folder.

    Args:
        folder: the checkpoint's folder.
        rank: the rank whose own metadata is read, for saves without collectives. Default: the metadata of all ranks.
        verify: refuse metadata and manifests that do not match their checksums. If False, whichever of the two is
            readable is used.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        CorruptCheckpointError: ``.metadata`` or the manifest is not what was written.
        ReplacedCheckpointError: other saves replaced the checkpoint again and again.
        UnsafeObjectError: ``.metadata`` names something that could run code.
    """
    try:
        return _read_stable(folder, rank, verify)
    except (CorruptCheckpointError, UnsafeObjectError) as first:
        if not folder.remote:
            raise
        index = _read_stable(folder, rank, verify)
        logger.warning(TRANSIT, folder.url, first)
        return index


def version_of(folder: Folder, rank: int | None = None) -> bytes | None:
    """Return the checksum of ``.metadata`` as it is now; None if the file is missing, b"" if it is not a file."""
    try:
        return checksum(folder.read(metadata_name(rank)))
    except FileNotFoundError:
        return None
    except (NotAFile, IsADirectoryError):
        return b""


def written_by(metadata: Metadata) -> str | None:
    """Return the id of the save that wrote DCP's metadata; None if another writer did, whose ids are longer."""
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return save_id if isinstance(save_id, str) and re.fullmatch("[0-9a-f]{16}", save_id) else None


def _read_stable(folder: Folder, rank: int | None, verify: bool) -> CheckpointIndex:
    """Read the index, again and again while saves replace the checkpoint."""
    name = metadata_name(rank)
    for _ in range(_READS):
        try:
            data = folder.read(name)
        except (NotAFile, IsADirectoryError) as error:
            raise _corrupt(name, b"", NOT_A_FILE) from error
        index = _read_once(folder, name, data, verify)
        if index is not None:
            return index
    raise ReplacedCheckpointError(
        f"the checkpoint in {folder.url} was replaced {_READS} times while its manifest was read. Save less often, or "
        "read a checkpoint that is not being replaced"
    )


def _read_once(folder: Folder, name: str, data: bytes, verify: bool) -> CheckpointIndex | None:
    """Read the index that ``.metadata`` leads to.

    Args:
        folder: the checkpoint's folder.
        name: the name of the metadata file.
        data: the bytes of that file.
        verify: as for ``read_index``.

    Returns:
        The index; None if another save has replaced ``.metadata`` meanwhile.
    """
    seal = read_seal(data)
    if seal is None or not seal.is_intact:
        return _read_unsealed(folder, name, data, seal, verify)
    file = manifest_name(seal.save_id)
    manifest = b""
    try:
        manifest = folder.read(file)
        if checksum(manifest) == seal.manifest:
            return _with_manifest(Manifest.from_bytes(manifest), seal, name, data)
        problem = f"it does not match the checksum in {name}"
    except FileNotFoundError:
        problem = "it is missing"
    except (NotAFile, IsADirectoryError):
        problem = NOT_A_FILE
    except ValueError as error:
        problem = str(error)
    if folder.read(name) != data:
        return None
    if verify:
        raise _corrupt(file, manifest, problem)
    logger.warning(
        "%s in %s is damaged (%s). Because of verify=False, the checkpoint is read without it",
        file,
        folder.url,
        problem,
    )
    return CheckpointIndex(read_metadata(seal.pickled, name), None, checksum(data))


def _read_unsealed(folder: Folder, name: str, data: bytes, seal: Seal | None, verify: bool) -> CheckpointIndex:
    """Read the index of a checkpoint whose seal is missing or broken.

    Either another writer wrote the checkpoint, or ``.metadata`` is damaged.
    """
    if seal is not None and verify:
        raise _corrupt(name, data, "it does not match its checksum")
    save_ids: list[str] = [] if seal is None else [seal.save_id]
    metadata = failure = None
    try:
        metadata = read_metadata(data if seal is None else seal.pickled, name)
        writer = written_by(metadata)
        save_ids += [writer] if writer else []
    except CheckpointError as error:
        failure = error
    names = folder.names()
    for save_id in save_ids:
        if manifest_name(save_id) in names:
            if verify:
                raise _corrupt(name, data, "the line that leads to its manifest is damaged")
            with suppress(ValueError, NotAFile, IsADirectoryError):
                return _with_manifest(Manifest.from_bytes(folder.read(manifest_name(save_id))), None, name, data)
    if failure is not None:
        raise failure
    assert metadata is not None
    if save_ids:
        logger.warning(
            "%s in %s was written by torch_xla_ckpt, but its manifest is missing. So nothing that is read can be "
            "checked. Restore from another checkpoint if there is one",
            name,
            folder.url,
        )
    return CheckpointIndex(metadata, None, checksum(data))


def _with_manifest(manifest: Manifest, seal: Seal | None, name: str, data: bytes) -> CheckpointIndex:
    if manifest.planner_data_is_pickled:
        try:
            manifest.metadata.planner_data = read_metadata(data if seal is None else seal.pickled, name).planner_data
        except CheckpointError as error:
            logger.warning("the planner data in %s is ignored, because it cannot be read safely: %s", name, error)
    return CheckpointIndex(manifest.metadata, manifest, checksum(data))


def _corrupt(name: str, data: bytes, problem: str) -> CorruptCheckpointError:
    damage = Damage(name, 0, len(data), (), problem)
    return CorruptCheckpointError(
        f"{name} is not what was written: {problem}. Restore from another checkpoint, or load with verify=False to use "
        "what is readable",
        [damage],
    )

"""Checkpoints in other formats: safetensors and ``torch.save`` files and folders, read like DCP checkpoints.

``formats`` finds the tensors. Here their places become the index of a checkpoint, so that all further code reads them
as it reads chunks of a DCP checkpoint: ranges of bytes, each once, straight into the planner's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.formats import Contents, is_weights, read_folder, read_safetensors, read_torch_file
from torch_xla_ckpt.protocols import Folder, Window
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage.checkpoint_index import CheckpointIndex
from torch_xla_ckpt.storage.file_errors import NOT_A_FILE, NotAFile
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import Location
from torch_xla_ckpt.storage.stored import Stored

LACKING = "no .metadata, no safetensors file and no torch.save file"
"""What a folder without any checkpoint has, for errors."""

_ZIP = b"PK\3\4"
_PICKLE = b"\x80"  # files of torch.save before torch 1.6, and pickles of other programs


@dataclass(frozen=True)
class Foreign:
    """A checkpoint in another format.

    Args:
        folder: the folder of its files.
        index: its items, and where they are stored.
        contents: what its files hold.
    """

    folder: Folder
    index: CheckpointIndex
    contents: Contents


def read_foreign(location: Location, folder: Folder) -> Foreign | None:
    """Return the checkpoint in another format at a path; None if there is none.

    Args:
        location: a folder, or a file.
        folder: the folder at the location, for the case that it is one.

    Raises:
        CorruptCheckpointError: a file is damaged.
        IncompleteCheckpointError: files or tensors that an index lists are missing.
        UnsafeObjectError: a file names something that could run code, or a file outside of the folder.
        CheckpointError: the path leads to a file of an unknown format, or names are not unique.
    """
    if is_file(location):
        parent = open_folder(location.parent)
        return _opened(parent, _read_file(parent, location.name))
    try:
        found = read_folder(folder)
    except NotADirectoryError:  # a pipe or a device
        return None
    except (NotAFile, IsADirectoryError) as error:
        raise CheckpointError(f"cannot read a model from {folder.url}: {error.filename}: {NOT_A_FILE}") from error
    return None if found is None else _opened(folder, found)


def is_file(location: Location) -> bool:
    """Whether a path leads to a file."""
    return bool(location.name) and open_folder(location.parent).is_file(location.name)


def holds_checkpoint(location: Location) -> bool:
    """Whether there is a checkpoint at a path, in any format. It may be damaged."""
    if is_file(location):
        return True
    names = open_folder(location).names()
    return METADATA in names or any(is_weights(name) for name in names)


def _read_file(folder: Folder, name: str) -> Contents:
    size = folder.size(name)
    first = bytes(folder.view([Window(name, 0, min(size, 4), ((0, min(size, 4)),))])[0]) if size else b""
    if first == _ZIP:
        return read_torch_file(folder, name)
    if first[:1] == _PICKLE and not name.endswith(".safetensors"):
        raise CheckpointError(
            f"{name} in {folder.url} is a pickle, or a torch.save file from before torch 1.6. Reading one could run "
            "code. Load it with torch.load(..., weights_only=True), and save it again with torch.save"
        )
    return read_safetensors(folder, [name])


def _opened(folder: Folder, found: Contents) -> Foreign:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, Stored] = {}
    for key, place in found.tensors.items():
        shape = torch.Size(place.shape)
        chunk = ChunkStorageMetadata(torch.Size((0,) * len(shape)), shape)
        entries[key] = TensorStorageMetadata(_dcp.properties(place.dtype, False), shape, [chunk])
        nbytes = shape.numel() * place.dtype.itemsize
        stored[MetadataIndex(key, chunk.offsets)] = Stored(place.file, place.offset, nbytes, 0, inline=place.data)
    first_file = next(iter(found.files), "")
    for key, data in found.objects.items():
        entries[key] = BytesStorageMetadata()
        stored[MetadataIndex(key)] = Stored(first_file, 0, len(data), inline=data)
    kind = Metadata if found.paths else _dcp.FlatMetadata
    metadata = kind(state_dict_metadata=entries, planner_data=dict(found.paths) or None, storage_data=stored)
    return Foreign(folder, CheckpointIndex(metadata, None, found.version, found.texts), found)

"""A quick look at a checkpoint: keys, shapes and sizes, without the objects that reading data needs.

A manifest of a million chunks is one JSON file. Reading it as DCP's ``Metadata`` makes several objects for each chunk.
The listing makes one for each key.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.storage.checkpoint_index import CheckpointIndex, read_index
from torch_xla_ckpt.storage.file_names import manifest_name, metadata_name
from torch_xla_ckpt.storage.manifest import parsed
from torch_xla_ckpt.storage.packed_manifest import chunk_count, sharding_of
from torch_xla_ckpt.storage.seal import read_seal
from torch_xla_ckpt.storage.stored import Stored, checksum

_INTEGERS = {int}
_OURS = "torch_xla_ckpt"


class ListedKey(NamedTuple):
    """One key of a checkpoint.

    Args:
        key: the key.
        dtype: the tensor's dtype, such as "float32"; None for an object.
        shape: the tensor's shape; None for an object.
        nbytes: bytes of the tensor's elements, or of the object's item.
        chunks: number of stored chunks; 1 for an object.
        sharding: the tensor's sharding when it was saved, as the writer described it; None if it was not recorded.
    """

    key: str
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    chunks: int
    sharding: str | None


@dataclass(frozen=True)
class Listing:
    """The keys of a checkpoint, and what its manifest says about the save.

    Args:
        keys: all keys, in saved order.
        files: size in bytes of each data file, by name. 0 if the checkpoint does not record it.
        kind: the format: "torch_xla_ckpt", "dcp" for checkpoints without a manifest, "safetensors" or "torch.save".
        save_id, time, step, user_metadata, software, writer: see ``Manifest``. Empty without a manifest, but
            ``user_metadata`` has the texts of safetensors files.
    """

    keys: tuple[ListedKey, ...]
    files: Mapping[str, int]
    kind: str
    save_id: str = ""
    time: str = ""
    step: int | None = None
    user_metadata: Any = None
    software: Mapping[str, str] | None = None
    writer: str = ""


@without_collector
def read_listing(folder: Folder, rank: int | None = None) -> Listing:
    """Return the listing of the checkpoint in a folder.

    Args:
        folder: the checkpoint's folder.
        rank: the rank that saved by itself. Default: the checkpoint of all ranks.

    Raises: as ``read_index``.
    """
    return _quick(folder, rank) or listing_of(read_index(folder, rank))


def _quick(folder: Folder, rank: int | None) -> Listing | None:
    """Return the listing that a whole manifest gives; None if anything about the checkpoint is unusual."""
    try:
        seal = read_seal(folder.read(metadata_name(rank)))
        if seal is None or not seal.is_intact:
            return None
        data = folder.read(manifest_name(seal.save_id))
        if checksum(data) != seal.manifest:
            return None
        return _from_json(parsed(data))
    except (OSError, LookupError, TypeError, AttributeError, ValueError, OverflowError):
        return None  # ``read_index`` finds the reason, and raises the right error


def _from_json(top: Mapping[str, Any]) -> Listing:
    sizes = {name: _itemsize(name) for name in {tensor["dtype"] for tensor in top["tensors"].values()}}
    keys = []
    for key, tensor in top["tensors"].items():
        shape, dtype, sharding = tuple(tensor["shape"]), tensor["dtype"], sharding_of(top, tensor)
        if not set(map(type, shape)) <= _INTEGERS or (shape and min(shape) < 0):
            raise ValueError("a shape with impossible sizes")
        if sharding is not None and type(sharding) is not str:
            raise ValueError("a sharding that is no text")
        nbytes = math.prod(shape) * sizes[dtype]
        keys.append(ListedKey(key, dtype, shape, nbytes, chunk_count(top, tensor), sharding))
    keys += [ListedKey(key, None, None, item[2], 1, None) for key, item in top["objects"].items()]
    return Listing(
        keys=_in_order(keys, top["paths"]),
        files=dict(top["files"]),
        kind=_OURS,
        save_id=top["save_id"],
        time=top["time"],
        step=top["step"],
        user_metadata=top["user_metadata"],
        software=top["software"],
        writer=str(top.get("writer", "")),
    )


def listing_of(index: CheckpointIndex, kind: str = "dcp") -> Listing:
    """Return the listing of a checkpoint whose index was read.

    Args:
        index: the index.
        kind: the format, if there is no manifest.
    """
    metadata, manifest = index.metadata, index.manifest
    stored = {index: Stored.of(entry) for index, entry in _entries(metadata).items()}
    shardings = {index.fqn: item.sharding for index, item in stored.items() if item.sharding}
    lengths = {index.fqn: item.length for index, item in stored.items() if index.offset is None}
    keys = []
    for key, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            dtype = saved.properties.dtype
            nbytes = math.prod(saved.size) * dtype.itemsize
            name = str(dtype).removeprefix("torch.")
            keys.append(ListedKey(key, name, tuple(saved.size), nbytes, len(saved.chunks), shardings.get(key)))
        else:
            keys.append(ListedKey(key, None, None, lengths.get(key, 0), 1, None))
    if manifest is None:
        files = Counter({item.relative_path: 0 for item in stored.values()})
        texts = dict(index.texts) or None
        return Listing(_in_order(keys, metadata.planner_data), files, kind, user_metadata=texts)
    return Listing(
        keys=_in_order(keys, metadata.planner_data),
        files=manifest.files,
        kind=_OURS,
        save_id=manifest.save_id,
        time=manifest.time,
        step=manifest.step,
        user_metadata=manifest.user_metadata,
        software=manifest.software,
        writer=manifest.writer,
    )


def _entries(metadata: Metadata) -> Mapping[Any, Any]:
    return metadata.storage_data if isinstance(metadata.storage_data, Mapping) else {}


def _in_order(keys: list[ListedKey], paths: Any) -> tuple[ListedKey, ...]:
    """Sort keys as the state dict had them, if the checkpoint records that."""
    if not isinstance(paths, Mapping):
        return tuple(keys)
    if list(paths) == [one.key for one in keys]:
        return tuple(keys)
    by_key = {one.key: one for one in keys}
    first = [by_key.pop(key) for key in paths if key in by_key]
    return (*first, *by_key.values())


def _itemsize(name: Any) -> int:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype {name!r}")
    return dtype.itemsize

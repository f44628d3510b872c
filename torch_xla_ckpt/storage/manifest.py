"""Reading the manifest: a JSON file with a checkpoint's keys, the place of each item, and the checksums of every byte.

The manifest repeats everything in ``.metadata`` and adds the facts for which DCP has no field. ``docs/format.md``
specifies it.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.storage.manifest_writing import FORMAT, PICKLED
from torch_xla_ckpt.storage.packed_manifest import PackedTensors
from torch_xla_ckpt.storage.stored import BLOCK, CHECKSUM_BYTES, Stored, checksum, padded

_MAX_DEPTH = 400  # levels of ``user_metadata``, as many as of a state dict; JSON readers fail somewhere below 1000
_VERSIONS = (1, 2)
_SEAL = re.compile(rb'\n"xxh3_64": "([0-9a-f]{16})"}')


def copied_user_metadata(value: Any) -> Any:
    """Return a copy of the caller's ``user_metadata``, as it will be read from the manifest.

    Raises:
        TypeError: the value contains something that JSON lacks.
        ValueError: the value contains NaN or an infinity, or is nested too deep.
    """
    level, depth = [value], 0
    try:
        text = json.dumps(value, allow_nan=False)
        while level and depth <= _MAX_DEPTH:
            level = [part for one in level for part in _parts(one)]
            depth += bool(level)
    except RecursionError:
        depth = _MAX_DEPTH + 1
    if depth > _MAX_DEPTH:
        raise ValueError(
            f"user_metadata is nested more than {_MAX_DEPTH} levels deep, and could not be read again. Flatten the "
            "value"
        )
    return json.loads(text)


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint.

    Args:
        save_id: the id in the names of this save's files.
        time: time of the commit, ISO 8601 in UTC.
        step: the training step; None if the caller gave none.
        user_metadata: any JSON value of the caller.
        software: versions of Python, torch and so on that wrote the checkpoint, by name.
        metadata: DCP's metadata. Its ``storage_data`` maps every item to its ``Stored``.
        files: size in bytes of each data file, by name.
        planner_data_is_pickled: whether only ``.metadata`` holds the planner's data, because it is no JSON.
        writer: the process that committed the checkpoint, for people to read; "" if unknown.
    """

    save_id: str
    time: str
    step: int | None
    user_metadata: Any
    software: Mapping[str, str]
    metadata: Metadata
    files: Mapping[str, int]
    planner_data_is_pickled: bool = False
    writer: str = ""

    @property
    def stored(self) -> Mapping[MetadataIndex, Stored]:
        """The place of every item."""
        return self.metadata.storage_data  # type: ignore[no-any-return]

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Return the manifest in a file's bytes.

        Raises:
            ValueError: the file is damaged.
            CheckpointError: the manifest has a newer version.
        """
        top = parsed(data)
        try:
            return cls._from_json(top)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"its checksum matches, but it is no manifest ({error})") from error

    @classmethod
    def _from_json(cls, top: Mapping[str, Any]) -> Manifest:
        files = dict(top["files"])
        if len(files) != len(top["files"]) or not set(map(type, files)) <= {str}:
            raise ValueError("a file is listed twice, or has no name")
        if top["version"] == 1:
            metadata = _metadata(top)
            _check_owners(metadata.storage_data.values(), files)
        else:
            metadata = PackedTensors(top, _dtype).metadata
            metadata.planner_data = _paths(top)
        metadata.storage_meta = StorageMeta(save_id=top["save_id"])
        return cls(
            save_id=top["save_id"],
            time=top["time"],
            step=top["step"],
            user_metadata=top["user_metadata"],
            software=top["software"],
            metadata=metadata,
            files=files,
            planner_data_is_pickled=top["paths"] == PICKLED,
            writer=str(top.get("writer", "")),
        )


def parsed(data: bytes) -> Mapping[str, Any]:
    """Return the JSON of a manifest whose own checksum and version are right. Nothing else in it is checked.

    Raises:
        ValueError: the file is damaged.
        CheckpointError: the manifest has a newer version.
    """
    end = data.rfind(b"\n")
    match = _SEAL.fullmatch(data, max(end, 0))
    if match is None or checksum(memoryview(data)[:end]).hex().encode() != match[1]:
        raise ValueError("its bytes do not match the checksum in its last line")
    try:
        top = json.loads(data[: end - 1] + b"}")
        version, block = top["version"], top["block"]
        is_known = top["format"] == FORMAT and version in _VERSIONS and type(version) is int and block == BLOCK
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"its checksum matches, but it is no manifest ({error})") from error
    if not is_known:
        raise CheckpointError(
            f"the manifest has version {version} and blocks of {block} bytes, and this torch_xla_ckpt reads versions "
            f"{' and '.join(map(str, _VERSIONS))} with blocks of {BLOCK} bytes. Install a newer torch_xla_ckpt"
        )
    return top  # type: ignore[no-any-return]


def _check_owners(items: Iterable[Stored], files: Mapping[str, int]) -> None:
    """Check that every byte of every file belongs to exactly one item.

    Raises:
        ValueError: bytes of a file belong to two items, or to none.
    """
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for item in items:
        spans[item.relative_path].append((item.offset, item.offset + item.extent))
    for name, parts in spans.items():
        end = 0
        for start, stop in sorted(parts):
            if start != end:
                what = "belong to two items" if start < end else "belong to no item"
                raise ValueError(f"bytes {min(start, end):,} to {max(start, end):,} of {name} {what}")
            end = stop
        if end != files[name]:
            raise ValueError(f"the items of {name} end at byte {end:,}, and its size is {files[name]!r}")


def _metadata(top: Mapping[str, Any]) -> Metadata:
    """Return DCP's metadata from a manifest's JSON.

    Equal sizes and properties share one object, so that the garbage collector has fewer objects to walk.
    """
    sizes: dict[tuple[int, ...], torch.Size] = {}
    names = [name for name, size in top["files"] if type(name) is str and type(size) is int]
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, Stored] = {}

    def size(numbers: list[int]) -> torch.Size:
        key = tuple(numbers)
        known = sizes.get(key)
        if known is None:
            if not all(type(number) is int and 0 <= number < 1 << 63 for number in key):
                raise ValueError("a shape with impossible sizes")
            known = sizes[key] = torch.Size(key)
        return known

    for key, tensor in top["tensors"].items():
        properties = _dcp.properties(_dtype(tensor["dtype"]), tensor["requires_grad"])
        chunks = []
        for offsets, lengths, *item in tensor["chunks"]:
            chunk = ChunkStorageMetadata(size(offsets), size(lengths))
            if not len(offsets) == len(lengths) == len(tensor["shape"]):
                raise ValueError("a chunk with another number of dimensions than its tensor")
            chunks.append(chunk)
            chunk_item = stored[MetadataIndex(key, chunk.offsets)] = _stored(item, names, tensor["sharding"])
            nbytes = math.prod(lengths) * properties.dtype.itemsize
            if chunk_item.data is not None and chunk_item.data + nbytes > chunk_item.length:
                raise ValueError("a chunk that is larger than its item")
        entries[key] = TensorStorageMetadata(properties, size(tensor["shape"]), chunks)
    for key, item in top["objects"].items():
        entries[key] = BytesStorageMetadata()
        object_item = stored[MetadataIndex(key)] = _stored(item, names, None)
        if object_item.data is not None:
            raise ValueError("an object with the bytes of a tensor")
    return Metadata(state_dict_metadata=entries, planner_data=_paths(top), storage_data=stored)


def _paths(top: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]] | None:
    """Return the path of each key from JSON; None if the manifest has no paths."""
    paths = top["paths"]
    return {key: tuple(map(_element, path)) for key, path in paths.items()} if isinstance(paths, dict) else None


def _element(element: Any) -> str | int:
    """Return one element of a path from JSON."""
    if type(element) is list:
        (number,) = element
        return _dcp.IntegerKey(operator.index(number))
    if type(element) not in (str, int):
        raise ValueError("a path with an element that is neither a name nor a number")
    return element


def _stored(item: Sequence[Any], names: Sequence[str], sharding: str | None) -> Stored:
    """Return an item from JSON.

    Args:
        item: the item's list.
        names: names of the data files.
        sharding: the sharding of the item's tensor.

    Raises:
        ValueError: the list does not name bytes of a file.
    """
    number, offset, length, data, checksums = item
    if not (
        type(number) is type(offset) is type(length) is int
        and (data is None or (type(data) is int and 0 <= data <= length))
        and min(number, offset, length) >= 0
        and type(names[number]) is str
        and len(checksums) == 2 * CHECKSUM_BYTES * max(1, math.ceil(padded(length) / BLOCK))
    ):
        raise ValueError("an item without a place in a file")
    return Stored(names[number], offset, length, data, bytes.fromhex(checksums), sharding)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the checkpoint has tensors of dtype {name}, which torch {torch.__version__} lacks. Install a newer torch"
        )
    return dtype

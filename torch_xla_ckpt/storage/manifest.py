"""The manifest: what a checkpoint holds, where each item lies, and the checksums of every byte.

It says all that ``.metadata`` says, as JSON, and what DCP has no place for. ``docs/format.md`` specifies it.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Bytes
from torch_xla_ckpt.storage.frame import ALIGNMENT

BLOCK = 4 << 20
"""Bytes that share a checksum, counted from the start of each item."""
TINY = 4 << 10
"""Items this small, in bytes, one thread handles on local disks: several would only fight over Python's lock."""

_MAX_DEPTH = 400  # levels of ``user_metadata``, as of a state dict: a JSON reader gives up somewhere below 1000
_FORMAT = "torch_xla_ckpt manifest"
_VERSION = 1
_SEAL = re.compile(rb'\n"xxh3_64": "([0-9a-f]{16})"}')
_CHECKSUM_BYTES = 8
_PICKLED = "pickled"  # a planner's data that is no paths lies only in ``.metadata``


class Stored(NamedTuple):
    """Where one item lies. The first three names are DCP's.

    Args:
        relative_path: the data file's name.
        offset: the item's first byte in it.
        length: the item's bytes, as stock DCP reads them.
        data: where the tensor's bytes begin in the item; None for what is not a plain tensor.
        checksums: XXH3-64 of each block, 8 bytes each, big-endian; None where the checkpoint has none.
        sharding: that of the tensor on the device, for people.
        transform_descriptors: DCP's extensions that the item was written through (never by this package).
    """

    relative_path: str
    offset: int
    length: int
    data: int | None = None
    checksums: bytes | None = None
    sharding: str | None = None
    transform_descriptors: Sequence[str] | None = None

    @property
    def extent(self) -> int:
        """The item's bytes with the zeros after it, up to the next item's place. Checksums cover all of them."""
        return padded(self.length)

    def block(self, number: int) -> tuple[int, int, bytes]:
        """A block's first byte in the file, the byte after its last, and its checksum."""
        assert self.checksums is not None
        start = number * BLOCK
        checksum = self.checksums[number * _CHECKSUM_BYTES : (number + 1) * _CHECKSUM_BYTES]
        return self.offset + start, self.offset + min(start + BLOCK, self.extent), checksum

    @property
    def blocks(self) -> int:
        return math.ceil(self.extent / BLOCK)


def foreign(place: Any) -> Stored:
    """Where stock DCP says that an item lies."""
    extensions = getattr(place, "transform_descriptors", None)
    return Stored(place.relative_path, place.offset, place.length, transform_descriptors=extensions)


def check_user_metadata(value: Any) -> None:
    """Show that a manifest can hold what the caller wants to have in it, and that it can be read again.

    Raises:
        TypeError, ValueError: it is no JSON, or has too many levels.
    """
    level, depth = [value], 0
    try:
        json.dumps(value, allow_nan=False)
        while level and depth <= _MAX_DEPTH:
            level = [part for one in level for part in _parts(one)]
            depth += bool(level)
    except RecursionError:
        depth = _MAX_DEPTH + 1
    if depth > _MAX_DEPTH:
        raise ValueError(
            f"user_metadata is nested more than {_MAX_DEPTH} levels deep, and could not be read again. Flatten it"
        )


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def padded(length: int) -> int:
    """``length`` rounded up to where the next item may start."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def checksum(data: Bytes) -> bytes:
    """XXH3-64 in its canonical, big-endian form."""
    return xxhash.xxh3_64_digest(data)


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint.

    Args:
        save_id: names the files of this save.
        time: when it was committed, ISO 8601 in UTC.
        step: the training step, if the caller gave one.
        user_metadata: the caller's, any JSON.
        software: versions that wrote it, by name.
        metadata: DCP's, whose ``storage_data`` maps every item to its ``Stored``.
        files: size of each data file.
        planner_data_is_pickled: the planner's data is no JSON, and lies only in ``.metadata``.
        writer: the process that committed it, for people; "" where that was not recorded.
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
        return self.metadata.storage_data  # type: ignore[no-any-return]

    def to_bytes(self) -> bytes:
        """The file: one JSON object, sealed by the checksum of all that comes before its last line."""
        names = list(self.files)
        numbers = {name: number for number, name in enumerate(names)}
        items = {(index.fqn, index.offset): _item(item, numbers) for index, item in self.stored.items()}
        shardings = {index.fqn: item.sharding for index, item in self.stored.items() if item.sharding}
        paths = self.metadata.planner_data
        top = {
            "format": _FORMAT,
            "version": _VERSION,
            "save_id": self.save_id,
            "time": self.time,
            "step": self.step,
            "user_metadata": self.user_metadata,
            "software": dict(self.software),
            "writer": self.writer,
            "block": BLOCK,
            "files": [[name, self.files[name]] for name in names],
            "paths": {key: _path(path) for key, path in paths.items()} if _are_paths(paths) else _unfit(paths),
            "tensors": {
                key: {
                    "dtype": str(saved.properties.dtype).removeprefix("torch."),
                    "shape": saved.size,
                    "requires_grad": saved.properties.requires_grad,
                    "sharding": shardings.get(key),
                    "chunks": [[chunk.offsets, chunk.sizes, *items[key, chunk.offsets]] for chunk in saved.chunks],
                }
                for key, saved in self.metadata.state_dict_metadata.items()
                if isinstance(saved, TensorStorageMetadata)
            },
            "objects": {
                key: items[key, None]
                for key, saved in self.metadata.state_dict_metadata.items()
                if isinstance(saved, BytesStorageMetadata)
            },
        }
        body = json.dumps(top, separators=(",", ":"), allow_nan=False)[:-1].encode("ascii") + b","
        return body + b'\n"xxh3_64": "%s"}' % checksum(body).hex().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            ValueError: it is damaged.
            CheckpointError: it is of a newer version.
        """
        body, newline, seal = data.rpartition(b"\n")
        match = _SEAL.fullmatch(newline + seal)
        if match is None or checksum(body).hex().encode() != match[1]:
            raise ValueError("its bytes do not fit the checksum in its last line")
        try:
            top = json.loads(body[:-1] + b"}")
            version, block = top["version"], top["block"]
            if top["format"] == _FORMAT and (version, block) == (_VERSION, BLOCK):
                return cls._from_json(top)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"its checksum fits, but it is no manifest ({error})") from error
        raise CheckpointError(
            f"the manifest is of version {version} with blocks of {block} bytes, and this "
            f"torch_xla_ckpt reads version {_VERSION} with blocks of {BLOCK}. Install a newer one"
        )

    @classmethod
    def _from_json(cls, top: Mapping[str, Any]) -> Manifest:
        metadata, files = _metadata(top), dict(top["files"])
        if len(files) != len(top["files"]):
            raise ValueError("a file is listed twice")
        _check_owners(metadata.storage_data.values(), files)
        return cls(
            save_id=top["save_id"],
            time=top["time"],
            step=top["step"],
            user_metadata=top["user_metadata"],
            software=top["software"],
            metadata=metadata,
            files=files,
            planner_data_is_pickled=top["paths"] == _PICKLED,
            writer=str(top.get("writer", "")),
        )


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


def _are_paths(planner_data: Any) -> bool:
    """Whether a planner's data is what DCP's planners record: the path of each key in the state dict."""
    if not isinstance(planner_data, Mapping):
        return False
    paths = planner_data.values()
    parts = chain.from_iterable(paths) if set(map(type, paths)) <= {tuple} else [None]
    return set(map(type, planner_data)) <= {str} and set(map(type, parts)) <= {str, int, _dcp.IntegerKey}


def _path(path: Sequence[str | int]) -> Sequence[str | int | list[int]]:
    """A path in JSON: an integer key of a mapping is a list of that integer."""
    return [[int(element)] if type(element) is _dcp.IntegerKey else element for element in path]


def _unfit(planner_data: Any) -> str | None:
    """What the manifest says of a planner's data that it cannot hold."""
    return None if planner_data is None else _PICKLED


def _item(item: Stored, numbers: Mapping[str, int]) -> list[Any]:
    assert item.checksums is not None
    return [numbers[item.relative_path], item.offset, item.length, item.data, item.checksums.hex()]


def _metadata(top: Mapping[str, Any]) -> Metadata:
    """DCP's metadata from the manifest. Equal sizes and properties are one object, for the garbage collector's sake."""
    sizes: dict[tuple[int, ...], torch.Size] = {}
    names = [name for name, size in top["files"] if type(name) is str and type(size) is int]
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, Stored] = {}

    def size(numbers: list[int]) -> torch.Size:
        key = tuple(numbers)
        known = sizes.get(key)
        if known is None:
            if not all(type(number) is int and 0 <= number < 1 << 63 for number in key):
                raise ValueError("a shape that is none")
            known = sizes[key] = torch.Size(key)
        return known

    for key, tensor in top["tensors"].items():
        properties = _dcp.properties(_dtype(tensor["dtype"]), tensor["requires_grad"])
        chunks = []
        for offsets, lengths, *item in tensor["chunks"]:
            chunk = ChunkStorageMetadata(size(offsets), size(lengths))
            if not len(offsets) == len(lengths) == len(tensor["shape"]):
                raise ValueError("a chunk of another number of dimensions than its tensor")
            chunks.append(chunk)
            place = stored[MetadataIndex(key, chunk.offsets)] = _stored(item, names, tensor["sharding"])
            nbytes = math.prod(lengths) * properties.dtype.itemsize
            if place.data is not None and place.data + nbytes > place.length:
                raise ValueError("a chunk that is larger than its item")
        entries[key] = TensorStorageMetadata(properties, size(tensor["shape"]), chunks)
    for key, item in top["objects"].items():
        entries[key] = BytesStorageMetadata()
        place = stored[MetadataIndex(key)] = _stored(item, names, None)
        if place.data is not None:
            raise ValueError("an object with a tensor's bytes")
    paths = top["paths"]
    planner_data = {key: tuple(map(_element, path)) for key, path in paths.items()} if isinstance(paths, dict) else None
    return Metadata(state_dict_metadata=entries, planner_data=planner_data, storage_data=stored)


def _element(element: Any) -> str | int:
    if type(element) is list:
        (number,) = element
        return _dcp.IntegerKey(operator.index(number))
    if type(element) not in (str, int):
        raise ValueError("a path of something else than names and numbers")
    return element


def _stored(item: Sequence[Any], names: Sequence[str], sharding: str | None) -> Stored:
    number, offset, length, data, checksums = item
    if not (
        type(number) is type(offset) is type(length) is int
        and (data is None or (type(data) is int and 0 <= data <= length))
        and min(number, offset, length) >= 0
        and type(names[number]) is str
        and len(checksums) == 2 * _CHECKSUM_BYTES * max(1, math.ceil(padded(length) / BLOCK))
    ):
        raise ValueError("an item lies nowhere")
    return Stored(names[number], offset, length, data, bytes.fromhex(checksums), sharding)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the checkpoint has tensors of dtype {name}, which torch {torch.__version__} lacks. Use a newer torch"
        )
    return dtype

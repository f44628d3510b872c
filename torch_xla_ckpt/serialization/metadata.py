"""DCP's metadata as the bytes of ``.metadata``, written for stock DCP and read without running code from them.

A pickle can call everything that it can name. This pickle can name DCP's metadata classes, torch's dtypes, and plain
values. Each of them is made by a function that checks its arguments.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CorruptCheckpointError, Damage, UnsafeObjectError
from torch_xla_ckpt.serialization import plain, torch_values
from torch_xla_ckpt.serialization.machine import Machine
from torch_xla_ckpt.serialization.table import CheckedFunction, Refused, Table, UnfinishedObject

METADATA = ".metadata"

_PROTOCOLS = (2, 3, 4, 5)  # DCP writes with Python's default, which has been 4 since Python 3.8, and 5 since 3.14
_Encoding = _dcp.MemoryFormatEncoding
_MEMORY_FORMATS = {
    _Encoding.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
    _Encoding.TORCH_CHANNELS_LAST: torch.channels_last,
    _Encoding.TORCH_PRESERVE_FORMAT: torch.preserve_format,
}


def _text(text: Any) -> str:
    """Return a string made from a string. Integer keys are pickled as such a call."""
    plain.require(type(text) is str, "a string")
    return str(text)


def _encoding(value: Any) -> Any:
    plain.require(type(value) is int, "a memory format")
    return _Encoding(value)


def _member(cls: Any, name: Any) -> Any:
    """Return a member of the enumeration of memory formats. Python 3.11.0 to 3.11.3 pickle members with ``getattr``."""
    plain.require(cls is _Encoding and type(name) is str and name in _Encoding.__members__, "a memory format")
    return getattr(_Encoding, name)


def _set_fields(instance: Any, state: Any) -> None:
    """Set the fields of a dataclass instance, as Python's pickle does.

    Unknown fields of newer torch versions are kept, unless the class has another attribute of that name.
    """
    cls = type(instance)
    plain.require(
        type(state) is dict
        and all(type(name) is str and (name in cls.__dataclass_fields__ or not hasattr(cls, name)) for name in state),
        f"the state of a {cls.__name__}",
    )
    vars(instance).update(state)


def _index() -> UnfinishedObject:
    """Return an unfinished ``MetadataIndex``. It computes its hash from its fields."""

    def finish(state: Any) -> MetadataIndex:
        plain.require(type(state) is dict, "an index")
        fqn, offset, index = (state.get(name) for name in ("fqn", "offset", "index"))
        plain.require(type(fqn) is str and (offset is None or isinstance(offset, torch.Size)), "an index")
        plain.require(index is None or type(index) is int, "an index")
        return MetadataIndex(fqn, offset, index)

    return UnfinishedObject(finish)


def _properties() -> UnfinishedObject:
    """Return unfinished ``TensorProperties``. Fields that torch 2.9 lacks are left out."""

    def finish(state: Any) -> TensorProperties:
        plain.require(type(state) is tuple and len(state) >= 5, "properties of a tensor")
        dtype, layout, requires_grad, memory_format, pin_memory = state[:5]
        plain.require(isinstance(memory_format, _Encoding), "properties of a tensor")
        return TensorProperties(dtype, layout, requires_grad, _MEMORY_FORMATS[memory_format], pin_memory)

    return UnfinishedObject(finish)


def _chunk(offsets: Any, sizes: Any) -> ChunkStorageMetadata:
    plain.require(isinstance(offsets, torch.Size) and isinstance(sizes, torch.Size), "a chunk")
    return ChunkStorageMetadata(offsets, sizes)


def _called_index(fqn: Any, offset: Any = None) -> MetadataIndex:
    plain.require(type(fqn) is str and (offset is None or isinstance(offset, torch.Size)), "an index")
    return MetadataIndex(fqn, offset)


def _stored(relative_path: Any, offset: Any, length: Any) -> Any:
    plain.require(type(relative_path) is str and type(offset) is type(length) is int, "a place in a file")
    return _dcp.StorageInfo(relative_path, offset, length)


def _table() -> Table:
    old = "torch.distributed._shard.sharded_tensor.metadata"  # the module of these classes up to torch 2.2
    classes = (
        *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, StorageMeta),
        *(MetadataIndex, TensorProperties, _Encoding, _dcp.StorageInfo),
    )
    # Paths of another operating system cannot be made here, only their pure variants.
    paths = {
        f"{module}.{prefix}{flavour}Path": getattr(pathlib, f"Pure{flavour}Path")
        for module in ("pathlib", "pathlib._local")
        for flavour in ("Posix", "Windows")
        for prefix in ("", "Pure")
    }
    kinds = (torch.layout, torch.memory_format)
    values: Mapping[str, Any] = {
        **plain.VALUES,
        **torch_values.VALUES,
        **paths,
        **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, kinds)},
        **{f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes},
        f"{old}.TensorProperties": TensorProperties,
        f"{old}.MEM_FORMAT_ENCODING": _Encoding,
        "builtins.getattr": CheckedFunction("builtins.getattr", _member),
    }
    filled: tuple[type, ...] = (
        *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, StorageMeta),
        _dcp.StorageInfo,
    )
    news: Mapping[type, Callable[..., Any]] = {
        **plain.NEWS,
        **{cls: functools.partial(cls.__new__, cls) for cls in filled},
        MetadataIndex: _index,
        TensorProperties: _properties,
    }
    states = {**plain.STATES, **dict.fromkeys(filled, _set_fields)}
    calls: Mapping[type, Callable[..., Any]] = {
        **plain.CALLS,
        **torch_values.CALLS,
        _Encoding: _encoding,
        str: _text,
        ChunkStorageMetadata: _chunk,
        MetadataIndex: _called_index,
        _dcp.StorageInfo: _stored,
    }
    return Table(values, calls, news, states)


_TABLE = _table()


def _storage(_: Any) -> Any:
    raise Refused("its pickle refers to data outside of the file")


_MOST = 1 << 63  # limit of positions in a file


def _is_plausible(metadata: Any) -> bool:
    """Whether the parts of the metadata have the types that the rest of the package relies on."""
    if not (isinstance(metadata, Metadata) and isinstance(metadata.state_dict_metadata, dict)):
        return False
    stored = metadata.storage_data
    return all(
        isinstance(key, str)
        and (
            isinstance(saved, BytesStorageMetadata)
            or (
                isinstance(saved, TensorStorageMetadata)
                and isinstance(saved.properties, TensorProperties)
                and isinstance(saved.properties.dtype, torch.dtype)
                and isinstance(saved.size, torch.Size)
                and isinstance(saved.chunks, list)
                and all(
                    isinstance(chunk, ChunkStorageMetadata)
                    and isinstance(chunk.offsets, torch.Size)
                    and isinstance(chunk.sizes, torch.Size)
                    and len(chunk.offsets) == len(chunk.sizes) == len(saved.size)
                    for chunk in saved.chunks
                )
            )
        )
        for key, saved in metadata.state_dict_metadata.items()
    ) and (
        stored is None
        or (
            isinstance(stored, dict)
            and all(
                isinstance(entry, _dcp.StorageInfo)
                and isinstance(index, MetadataIndex)
                and type(entry.relative_path) is str
                and type(entry.offset) is int
                and type(entry.length) is int
                and 0 <= entry.offset < _MOST
                and 0 <= entry.length < _MOST
                for index, entry in stored.items()
            )
        )
    )


def read_metadata(data: bytes, name: str = METADATA) -> Metadata:
    """Return DCP's metadata from the bytes of ``.metadata``, without running code from them.

    Args:
        data: the bytes. Bytes behind the pickle are ignored.
        name: the file's name, for errors. Default: ".metadata".

    Raises:
        UnsafeObjectError: the file names something that is no part of DCP's metadata.
        CorruptCheckpointError: the file cannot be read.
    """
    try:
        metadata = Machine(data, _TABLE, dict, _storage, _PROTOCOLS).run()
        if _is_plausible(metadata):
            return metadata
        problem = f"it holds a {type(metadata).__name__} that DCP does not write"
    except Refused as error:
        if error.names:
            raise UnsafeObjectError(
                f"refused to read {METADATA}: it names {', '.join(error.names)}, which is no part of DCP's metadata "
                "and could run code. If you trust the writer, read the checkpoint with DCP's own FileSystemReader",
                key=METADATA,
                types=error.names,
            ) from error
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    raise CorruptCheckpointError(
        f"{name} is not the metadata of a checkpoint ({problem}). Restore from another checkpoint",
        [Damage(name, 0, len(data), (), "no metadata of a checkpoint")],
    )

"""The bytes of ``.metadata``, and reading them without running what they name.

A pickle can call anything it can name. Here it can name DCP's metadata classes, torch's dtypes, and plain values; each
is made by a function that checks its arguments (see ``serialization``).
"""

from __future__ import annotations

import copyreg
import functools
import io
import pathlib
import pickle
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
from torch_xla_ckpt.serialization import plain
from torch_xla_ckpt.serialization.machine import Machine, Maker, Pending, Refused, Table

METADATA = ".metadata"

_PROTOCOLS = (2, 3, 4, 5)  # DCP writes with Python's default, which has been 4 since Python 3.8, and 5 since 3.14
_Encoding = _dcp.MemoryFormatEncoding
_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr)}
_MEMORY_FORMATS = {
    _Encoding.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
    _Encoding.TORCH_CHANNELS_LAST: torch.channels_last,
    _Encoding.TORCH_PRESERVE_FORMAT: torch.preserve_format,
}


def _size(*sizes: Any) -> torch.Size:
    (numbers,) = sizes or ((),)
    plain.require(type(numbers) is tuple and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers), "a size")
    return torch.Size(numbers)


def _text(text: Any) -> str:
    """Make a string of a string: so integer keys are pickled."""
    plain.require(type(text) is str, "a string")
    return str(text)


def _layout(name: Any) -> torch.layout:
    plain.require(type(name) is str and name in _LAYOUTS, "a layout")
    return _LAYOUTS[name]


def _encoding(value: Any) -> Any:
    plain.require(type(value) is int, "a memory format")
    return _Encoding(value)


def _member(cls: Any, name: Any) -> Any:
    """Return a member of the one enumeration there is: Python 3.11.0 to 3.11.3 pickle it with ``getattr``."""
    plain.require(cls is _Encoding and type(name) is str and name in _Encoding.__members__, "a memory format")
    return getattr(_Encoding, name)


def _fill(made: Any, state: Any) -> None:
    """Give an instance of a dataclass its fields, as pickle does.

    Newer versions of torch may have further fields: they are kept, unless the class has something else of that name.
    """
    cls = type(made)
    plain.require(
        type(state) is dict
        and all(type(name) is str and (name in cls.__dataclass_fields__ or not hasattr(cls, name)) for name in state),
        f"the state of a {cls.__name__}",
    )
    vars(made).update(state)


def _index() -> Pending:
    """Make a ``MetadataIndex``, which is hashed."""

    def finish(state: Any) -> MetadataIndex:
        plain.require(type(state) is dict, "an index")
        fqn, offset, index = (state.get(name) for name in ("fqn", "offset", "index"))
        plain.require(type(fqn) is str and (offset is None or isinstance(offset, torch.Size)), "an index")
        plain.require(index is None or type(index) is int, "an index")
        return MetadataIndex(fqn, offset, index)

    return Pending(finish)


def _properties() -> Pending:
    """Make ``TensorProperties``; what newer versions of torch add behind the five fields of 2.9 is left out."""

    def finish(state: Any) -> TensorProperties:
        plain.require(type(state) is tuple and len(state) >= 5, "properties of a tensor")
        dtype, layout, requires_grad, memory_format, pin_memory = state[:5]
        plain.require(isinstance(memory_format, _Encoding), "properties of a tensor")
        return TensorProperties(dtype, layout, requires_grad, _MEMORY_FORMATS[memory_format], pin_memory)

    return Pending(finish)


def _table() -> Table:
    old = "torch.distributed._shard.sharded_tensor.metadata"  # where torch up to 2.2 kept them
    classes = (
        *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, StorageMeta),
        *(MetadataIndex, TensorProperties, _Encoding, _dcp.StorageInfo),
    )
    # A path of another system cannot be made here, but can be read.
    paths = {
        f"{module}.{prefix}{flavour}Path": getattr(pathlib, f"Pure{flavour}Path")
        for module in ("pathlib", "pathlib._local")
        for flavour in ("Posix", "Windows")
        for prefix in ("", "Pure")
    }
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    values: Mapping[str, Any] = {
        **plain.VALUES,
        **paths,
        **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, kinds)},
        **{f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes},
        f"{old}.TensorProperties": TensorProperties,
        f"{old}.MEM_FORMAT_ENCODING": _Encoding,
        "torch.Size": torch.Size,
        "torch.serialization._get_layout": Maker("torch.serialization._get_layout", _layout),
        "builtins.getattr": Maker("builtins.getattr", _member),
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
    states = {**plain.STATES, **dict.fromkeys(filled, _fill)}
    calls = {**plain.CALLS, torch.Size: _size, _Encoding: _encoding, str: _text}
    return Table(values, calls, news, states)


_TABLE = _table()


def _storage(_: Any) -> Any:
    raise Refused("it refers to something outside of itself")


_MOST = 1 << 63  # no file has more bytes


def _is_plausible(metadata: Any) -> bool:
    """Whether the parts of metadata have the types that everything else relies on."""
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
                isinstance(place, _dcp.StorageInfo)
                and isinstance(index, MetadataIndex)
                and type(place.relative_path) is str
                and type(place.offset) is int
                and type(place.length) is int
                and 0 <= place.offset < _MOST
                and 0 <= place.length < _MOST
                for index, place in stored.items()
            )
        )
    )


def pickled_metadata(metadata: Metadata) -> bytes:
    """Return the bytes that stock DCP reads as ``.metadata``, of torch 2.9 to 2.15.

    torch 2.15 added a field to ``TensorProperties`` that earlier ones refuse and later ones do not need.
    """
    data = io.BytesIO()
    pickler = pickle.Pickler(data)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduced_properties}
    pickler.dump(metadata)
    return data.getvalue()


def _reduced_properties(properties: TensorProperties) -> tuple[Any, ...]:
    return copyreg.__newobj__, (TensorProperties,), properties.__getstate__()[:5]  # type: ignore[attr-defined]


def read_metadata(data: bytes, name: str = METADATA) -> Metadata:
    """DCP's metadata from the bytes of ``.metadata``, running nothing. Bytes behind the pickle are ignored.

    Raises:
        UnsafeObjectError: it names something that is no part of DCP's metadata.
        CorruptCheckpointError: it cannot be read.
    """
    try:
        metadata = Machine(data, _TABLE, dict, _storage, _PROTOCOLS).run()
        if _is_plausible(metadata):
            return metadata
        problem = f"what it holds, a {type(metadata).__name__}, is nothing that DCP writes"
    except Refused as error:
        if error.names:
            raise UnsafeObjectError(
                f"refused to read {METADATA}: it names {', '.join(error.names)}, which is no part of DCP's metadata "
                "and could run code. If you trust its writer, read the checkpoint with DCP's own FileSystemReader",
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

"""Reading ``.metadata`` without running what it names.

A pickle can call anything it can name. This unpickler can name nothing but DCP's metadata classes, torch's dtypes and
sizes, and a few builtin containers; none of them does anything with its arguments but keep them.
"""

from __future__ import annotations

import collections
import enum
import io
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.errors import CorruptCheckpointError, Damage, UnsafeObjectError

METADATA = ".metadata"

_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr)}
_METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "_MEM_FORMAT_ENCODING",
)


def _layout(name: str) -> torch.layout:
    return _LAYOUTS[name]


def _member(cls: Any, name: Any) -> Any:
    """What ``getattr`` may do here: Python 3.11.0 to 3.11.3 pickle a member of an enumeration with it."""
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum) and name in cls.__members__):
        raise pickle.UnpicklingError("getattr of something that is not an enumeration")
    return cls[name]


def _allowed() -> dict[tuple[str, str], Callable[..., Any]]:
    old = "torch.distributed._shard.sharded_tensor.metadata"  # where torch up to 2.2 kept them
    allowed: dict[tuple[str, str], Callable[..., Any]] = {
        **{(dcp_metadata.__name__, name): getattr(dcp_metadata, name) for name in _METADATA_CLASSES},
        (old, "TensorProperties"): dcp_metadata.TensorProperties,
        (old, "MEM_FORMAT_ENCODING"): dcp_metadata._MEM_FORMAT_ENCODING,
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _layout,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("builtins", "getattr"): _member,
    }
    for cls in (bool, dict, float, frozenset, int, list, set, str, tuple):
        allowed["builtins", cls.__name__] = cls
    for module in ("pathlib", "pathlib._local"):
        for flavour in ("Posix", "Windows"):
            # A path of another system cannot be made here, but can be read.
            pure = getattr(pathlib, f"Pure{flavour}Path")
            allowed[module, f"{flavour}Path"] = allowed[module, f"Pure{flavour}Path"] = pure
    return allowed


class _Unpickler(pickle.Unpickler):
    _ALLOWED = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        if module == "__builtin__":  # Python 2's name, which pickle protocols up to 2 use
            module = "builtins"
        found = self._ALLOWED.get((module, name))
        if found is not None:
            return found
        value = vars(torch).get(name) if module == "torch" else None
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return value
        raise UnsafeObjectError(
            f"refused to read {METADATA}: it names {module}.{name}, which is no part of DCP's metadata and could run "
            "code. If you trust whoever wrote the checkpoint, read it with DCP's own FileSystemReader",
            key=METADATA,
            types=[f"{module}.{name}"],
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of itself")


def read_metadata(data: bytes, name: str = METADATA) -> Metadata:
    """DCP's metadata from the bytes of ``.metadata``, running nothing.

    Raises:
        UnsafeObjectError: it names something that is no part of DCP's metadata.
        CorruptCheckpointError: it cannot be read.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except UnsafeObjectError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(metadata, Metadata) and isinstance(metadata.state_dict_metadata, dict):
            return metadata
        problem = f"it holds a {type(metadata).__name__}"
    raise CorruptCheckpointError(
        f"{name} is not the metadata of a checkpoint ({problem}). Restore from another checkpoint",
        [Damage(name, 0, len(data), (), "no metadata of a checkpoint")],
    )

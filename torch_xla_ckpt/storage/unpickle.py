"""Reading ``.metadata`` without running what it names.

A pickle can call anything it can name. This unpickler can name nothing but DCP's metadata classes, torch's dtypes and
sizes, and a few builtin containers; none of them does anything with its arguments but keep them.
"""

from __future__ import annotations

import collections
import copyreg
import enum
import io
import pathlib
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_xla_ckpt import forks
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


_CHANGEABLE = [
    thing
    for thing in [*_Unpickler._ALLOWED.values(), *dcp_metadata._MEM_FORMAT_ENCODING]
    if hasattr(thing, "__dict__") and thing.__module__ != "builtins"
]
_unpickling = threading.Lock()
_before: tuple[int, list[dict[str, Any]]] | None = None  # the thread that unpickles, and their attributes before


@forks.in_child
def _stop_unpickling() -> None:
    """In a forked child, undo what another thread's pickle has set."""
    global _unpickling, _before
    _unpickling = threading.Lock()
    if _before is not None and _before[0] != threading.get_ident():
        for thing, old in zip(_CHANGEABLE, _before[1]):
            _restored(thing, old)
        _before = None


@contextmanager
def _unchanged() -> Iterator[None]:
    """Undo what a pickle sets on the classes and functions that it names: BUILD sets attributes of anything.

    Raises:
        UnsafeObjectError: it did.
    """
    global _before
    with _unpickling:
        before = [dict(vars(thing)) for thing in _CHANGEABLE]
        _before = threading.get_ident(), before
        try:
            yield
        finally:
            _before = None
            changed = [_restored(thing, old) for thing, old in zip(_CHANGEABLE, before)]
            if any(changed):
                names = [str(thing) for thing, was in zip(_CHANGEABLE, changed) if was]
                raise UnsafeObjectError(
                    f"refused to read {METADATA}: it changes {', '.join(names)}, which no metadata of DCP does",
                    key=METADATA,
                    types=names,
                )


def _restored(thing: Any, old: dict[str, Any]) -> bool:
    now = vars(thing)
    wrong = [name for name in {*now, *old} if now.get(name, now) is not old.get(name, now)]
    for name in wrong:
        if isinstance(thing, enum.Enum):
            now.pop(name, None)
            now.update({name: old[name]} if name in old else {})
        elif name in old:
            setattr(thing, name, old[name])
        else:
            delattr(thing, name)
    return bool(wrong)


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
                isinstance(place, filesystem._StorageInfo)
                and isinstance(index, MetadataIndex)
                and type(place.relative_path) is str
                and type(place.offset) is int
                and type(place.length) is int
                and place.offset >= 0 <= place.length
                for index, place in stored.items()
            )
        )
    )


def read_metadata(data: bytes, name: str = METADATA) -> Metadata:
    """DCP's metadata from the bytes of ``.metadata``, running nothing.

    Raises:
        UnsafeObjectError: it names something that is no part of DCP's metadata.
        CorruptCheckpointError: it cannot be read.
    """
    # Codes of extensions that were resolved before would go past find_class.
    copyreg.clear_extension_cache()
    try:
        with _unchanged():
            metadata = _Unpickler(io.BytesIO(data)).load()
        if _is_plausible(metadata):
            return metadata
    except UnsafeObjectError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        problem = f"what it holds, a {type(metadata).__name__}, is nothing that DCP writes"
    raise CorruptCheckpointError(
        f"{name} is not the metadata of a checkpoint ({problem}). Restore from another checkpoint",
        [Damage(name, 0, len(data), (), "no metadata of a checkpoint")],
    )

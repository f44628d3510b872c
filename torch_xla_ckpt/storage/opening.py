"""The storage of a call to ``save``, ``async_save`` or ``load``: made from its path, or passed beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp

from torch_xla_ckpt.storage.location import Location, PathLike
from torch_xla_ckpt.storage.reader import ShardReader
from torch_xla_ckpt.storage.writer import ShardWriter

_Reader = TypeVar("_Reader", bound=dcp.StorageReader)


def open_reader(
    path: PathLike | None,
    reader: _Reader | None,
    storage_options: Mapping[str, Any] | None,
    *,
    verify: bool,
    progress: bool,
) -> _Reader | ShardReader:
    """Return the storage reader of a call: the one that was passed, or a new ``ShardReader``.

    Args:
        path: the checkpoint's folder; None if the call has none.
        reader: the storage reader of the call; None if it has none. Without a path yet, it gets the call's path.
        storage_options: options of fsspec's filesystem; None if the call has none.
        verify, progress: options of a new ``ShardReader``.

    Raises:
        ValueError: there is no path; ``path`` is not the reader's path; or there are storage options beside a reader.
    """
    if reader is None:
        return ShardReader(required_path(path), verify=verify, progress=progress, storage_options=storage_options)
    _set_path(reader, path, storage_options, "reader")
    return reader


def open_writer(
    path: PathLike | None,
    writer: dcp.StorageWriter | None,
    storage_options: Mapping[str, Any] | None,
    *,
    sync: bool,
    step: int | None,
    user_metadata: Any,
    progress: bool,
) -> dcp.StorageWriter:
    """Return the storage writer of a call: the one that was passed, or a new ``ShardWriter``.

    Args:
        path: the checkpoint's folder; None if the call has none.
        writer: the storage writer of the call; None if it has none. Without a path yet, it gets the call's path.
        storage_options: options of fsspec's filesystem; None if the call has none.
        sync, step, user_metadata, progress: options of a new ``ShardWriter``.

    Raises:
        ValueError: there is no path; ``path`` is not the writer's path; or there are storage options beside a writer.
    """
    if writer is None:
        return ShardWriter(
            required_path(path),
            sync=sync,
            step=step,
            user_metadata=user_metadata,
            progress=progress,
            storage_options=storage_options,
        )
    _set_path(writer, path, storage_options, "writer")
    return writer


def path_of(storage: dcp.StorageWriter | dcp.StorageReader) -> PathLike | Location | None:
    """Return the path of a storage writer or reader; None if it has none, or does not tell it."""
    if isinstance(storage, (ShardWriter, ShardReader)):
        return storage.location
    path = getattr(storage, "checkpoint_id", None)
    return path if isinstance(path, (str, os.PathLike)) and os.fspath(path) else None


def required_path(path: PathLike | None) -> PathLike:
    """Return the path of a call.

    Raises:
        ValueError: the call has none.
    """
    if path is None:
        raise ValueError("there is no path to the checkpoint. Pass path=, or a storage writer or reader that has one")
    return path


def _set_path(
    storage: dcp.StorageWriter | dcp.StorageReader,
    path: PathLike | None,
    storage_options: Mapping[str, Any] | None,
    kind: str,
) -> None:
    """Give a call's path to the storage that was passed beside it.

    Args:
        storage: the storage writer or reader.
        path: the path of the call; None if it has none.
        storage_options: the options of the call; None if it has none.
        kind: "writer" or "reader", for errors.

    Raises:
        ValueError: the storage has another path; or the call has storage options.
    """
    if storage_options is not None:
        raise ValueError(
            f"storage_options= was passed beside storage_{kind}=, which has storage options of its own. Pass them to "
            f"the storage {kind} when you make it"
        )
    if path is None:
        return
    known = path_of(storage)
    if isinstance(storage, (ShardWriter, ShardReader)):
        before = storage.location
        storage.reset(path)  # parses the path with the options of the storage
        is_same = storage.location.identity == before.identity
        if not is_same:
            storage.reset(before)
    else:
        is_same = known is None or isinstance(known, Location) or _leads_to_same(path, known)
        if is_same:
            storage.reset(path)
    if not is_same:
        raise ValueError(
            f"the call has the path {os.fspath(path)}, but its storage {kind} has the path {known}. Pass only one of "
            "them, or the same path in both"
        )


def _leads_to_same(path: PathLike, other: PathLike) -> bool:
    return os.fspath(path) == os.fspath(other) or Location.of(path).identity == Location.of(other).identity

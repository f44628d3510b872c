"""Torch's side of torch.distributed.checkpoint (DCP): its types made from ours, and its private names.

A new torch release that moves something in DCP is this file's work.
"""

from __future__ import annotations

import dataclasses
import io
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import lru_cache
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlanner,
    ReadItem,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

from torch_xla_ckpt.errors import CheckpointError, MismatchError, ReplacedCheckpointError
from torch_xla_ckpt.layout import Box, BoxArray, Flaw, Integers, covers_exactly, find_flaws


class IntegerKey(str):
    """An element of a path that is an integer key of a mapping.

    DCP knows strings only, and brings the state of an optimizer back under other keys than it had. It is pickled as a
    string, so that a checkpoint names no class of ours.
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        return str, (str.__str__(self),)


NOT_STORED = "is listed, but stored in no file"
"""What is wrong with an item that the metadata lists and that ``storage_data`` lacks."""

_STATELESS = frozenset({torch.Tensor, torch.nn.Parameter, dict, list, int, float, str})


def save(
    state_dict: dict[str, Any],
    writer: StorageWriter,
    planner: SavePlanner,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
) -> Metadata:
    """``dcp.save`` of a state dict whose ``Stateful``s have been asked for their states."""
    return _save_state_dict(state_dict, writer, process_group, no_dist=no_dist, planner=planner)


def load(
    state_dict: dict[str, Any],
    reader: StorageReader,
    planner: LoadPlanner,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
) -> None:
    """``dcp.load`` into a state dict whose ``Stateful``s have been asked for their states."""
    _load_state_dict(state_dict, reader, process_group, no_dist=no_dist, planner=planner)


def is_stateful(value: Any) -> bool:
    """Whether DCP saves the state of ``value`` in its place."""
    # What most values are, first: asking whether something has a protocol's methods takes long.
    return type(value) not in _STATELESS and isinstance(value, Stateful)


def state_of(value: Any) -> Any:
    """What DCP saves for ``value``."""
    return value.state_dict() if is_stateful(value) else value


def is_sharded_tensor(tensor: torch.Tensor) -> bool:
    """Whether this is the old ``ShardedTensor``, which is no tensor of its own shape on this process."""
    return isinstance(tensor, ShardedTensor)


def dtensor_box(tensor: DTensor) -> Box | None:
    """What this rank holds of a DTensor, or None when it has no place in the tensor's device mesh."""
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return box_of(chunk)


@lru_cache(maxsize=256)
def properties(dtype: torch.dtype, requires_grad: bool) -> TensorProperties:
    """What DCP records of a tensor beside its size. One object serves all tensors alike, and is pickled once."""
    return TensorProperties(dtype=dtype, requires_grad=requires_grad)


@lru_cache(maxsize=4096)
def size_of(shape: tuple[int, ...]) -> torch.Size:
    """One object for all tensors of a shape, which is pickled once."""
    return torch.Size(shape)


@lru_cache(maxsize=4096)
def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=size_of(box.offsets), sizes=size_of(box.sizes))


def box_of(chunk: ChunkStorageMetadata) -> Box:
    return _box(chunk.offsets, chunk.sizes)


@lru_cache(maxsize=4096)
def _box(offsets: torch.Size, sizes: torch.Size) -> Box:
    return Box(tuple(offsets), tuple(sizes))


def unstored(metadata: Metadata, keys: Iterable[str]) -> dict[str, list[str]]:
    """Describe the items that the metadata lists under some keys, but that no file holds.

    A storage writer that fails in a worker thread can leave such a checkpoint behind and report success. Storage
    whose ``storage_data`` is not DCP's mapping from items to places in files cannot be checked; for such storage the
    result is empty.

    Args:
        metadata: the checkpoint's metadata.
        keys: keys of the checkpoint.

    Returns:
        For each key with such items, a description of each item.
    """
    storage_data = metadata.storage_data
    if not isinstance(storage_data, Mapping) or not set(map(type, storage_data)) <= {MetadataIndex}:
        return {}
    stored = {(index.fqn, index.offset) for index in storage_data}
    missing: dict[str, list[str]] = {}
    for key in keys:
        saved = metadata.state_dict_metadata[key]
        if not isinstance(saved, TensorStorageMetadata):
            gone = [] if (key, None) in stored else ["the object"]
        else:
            gone = [str(box_of(chunk)) for chunk in saved.chunks if (key, chunk.offsets) not in stored]
        if gone:
            missing[key] = [f"{item} {NOT_STORED}" for item in gone]
    return missing


def cover_flaws(saved: TensorStorageMetadata) -> tuple[Flaw, ...]:
    """Return regions of a saved tensor that its chunks do not cover exactly once, at most three; none if all is well.

    Raises:
        ValueError: a chunk has another number of dimensions than the tensor.
    """
    if is_one_chunk(saved):
        return ()
    whole, chunks = Box.whole(saved.size), boxes_of(saved)
    return () if covers_exactly(whole, chunks) else find_flaws(whole, chunks)


def is_one_chunk(saved: TensorStorageMetadata) -> bool:
    """Whether the tensor was saved as a single chunk that is all of it, so that there is nothing to prove."""
    return len(saved.chunks) == 1 and saved.chunks[0].sizes == saved.size and not any(saved.chunks[0].offsets)


def boxes_of(saved: TensorStorageMetadata) -> BoxArray:
    """The chunks of a saved tensor.

    Raises:
        ValueError: a chunk has another number of dimensions than the tensor.
    """
    return BoxArray.of(((chunk.offsets, chunk.sizes) for chunk in saved.chunks), len(saved.size))


def whole_read(key: str, source: str, saved: TensorStorageMetadata, box: Box) -> ReadItem:
    """The order to read ``box`` for the target's ``key`` out of the only chunk of the tensor saved as ``source``."""
    offset, lengths = torch.Size(box.offsets), torch.Size(box.sizes)
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(key, offset),
        dest_offsets=torch.Size((0,) * len(lengths)),
        storage_index=MetadataIndex(source, saved.chunks[0].offsets),
        storage_offsets=offset,
        lengths=lengths,
    )


def tensor_item(key: str, chunk: ChunkStorageMetadata, properties: TensorProperties, shape: torch.Size) -> WriteItem:
    """The order to write one chunk of a tensor."""
    return WriteItem(
        index=MetadataIndex(key, chunk.offsets),
        type=WriteItemType.TENSOR if chunk.sizes == shape else WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shape),
    )


def part_of(item: WriteItem, box: Box) -> WriteItem:
    """The order to write ``box``, part of what ``item`` writes."""
    assert item.tensor_data is not None
    return tensor_item(item.index.fqn, chunk_of(box), item.tensor_data.properties, item.tensor_data.size)


def object_item(key: str) -> WriteItem:
    """The order to write something that is not a tensor."""
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)


class TensorReads:
    """The orders to read parts of the tensor saved as ``source`` for the target's ``key``.

    Orders share their offsets, sizes and indices where these are equal: a load can have millions of orders, and it is
    the number of objects that the garbage collector walks which decides how long planning takes.
    """

    def __init__(self, key: str, source: str, chunks: BoxArray):
        self._key = key
        self._source = source
        self._chunks = chunks
        self._indices: dict[int, MetadataIndex] = {}
        self._sizes: dict[tuple[int, ...], torch.Size] = {}

    def fill(self, target: Box, numbers: Integers, parts: BoxArray) -> list[ReadItem]:
        """The orders to fill the box ``target``, whose region ``parts[n]`` lies in the chunk ``numbers[n]``."""
        index = MetadataIndex(self._key, target.offsets)
        starts = self._chunks.take(numbers).starts
        columns = (
            parts.starts - target.bounds[0],
            parts.starts - starts,
            parts.stops - parts.starts,
        )
        return [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=index,
                dest_offsets=self._size(into),
                storage_index=self._index(number),
                storage_offsets=self._size(out_of),
                lengths=self._size(lengths),
            )
            for number, into, out_of, lengths in zip(numbers.tolist(), *(column.tolist() for column in columns))
        ]

    def _index(self, number: int) -> MetadataIndex:
        index = self._indices.get(number)
        if index is None:
            index = self._indices[number] = MetadataIndex(self._source, self._chunks.starts[number].tolist())
        return index

    def _size(self, numbers: list[int]) -> torch.Size:
        key = tuple(numbers)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = torch.Size(key)
        return size


def read_object(key: str, source: str) -> ReadItem:
    """The order to read what was saved as ``source`` and is not a tensor, for the target's ``key``."""
    nowhere = torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(key), nowhere, MetadataIndex(source), nowhere, nowhere)


def finished(metadata: Metadata, storage_data: Any, storage_meta: StorageMeta) -> Metadata:
    """What a planner made of a save, with what only storage knows."""
    return dataclasses.replace(
        metadata, storage_data=storage_data, storage_meta=storage_meta, version=CURRENT_DCP_VERSION
    )


def place(relative_path: str, offset: int, length: int) -> _StorageInfo:
    """Where an item lies, as stock DCP pickles it."""
    return _StorageInfo(relative_path, offset, length)


def untransformed(item: ReadItem, descriptors: Sequence[str], data: IO[bytes]) -> io.BytesIO:
    """An item as it was before the extensions that DCP's writer passed it through."""
    stream = _StorageReaderTransforms().transform_load_stream(item, descriptors, data)
    return io.BytesIO(stream.read(-1))


def async_save_under_way() -> tuple[Future[Any], str | os.PathLike[str] | None] | None:
    """The future and the path of the ``dcp.async_save`` that calls the caller's caller, if there is such.

    DCP gives a stager no other way to learn them.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "async_save" or "upload_future" not in frame.f_locals:
        return None
    return frame.f_locals["upload_future"], getattr(frame.f_locals["storage_writer"], "checkpoint_id", None)


def use_group(group: dist.ProcessGroup, instead_of: Sequence[dist.ProcessGroup | None]) -> None:
    """Let the DCP save that runs the caller coordinate through ``group``, if it was going to use one of the others.

    To be called from a planner's ``set_up_planner``: nothing has been coordinated by then. DCP has no option for
    this, and ``dcp.async_save`` by default coordinates in its thread through the group whose barriers the training
    loop waits in. Members of one group meet in the other's order, which hangs or mixes up what they say.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        wrapper = frame.f_locals.get("self") if frame.f_code.co_name in ("reduce_scatter", "all_reduce") else None
        if isinstance(wrapper, _DistWrapper):
            if wrapper.use_dist and any(wrapper.group is other for other in instead_of):
                wrapper.group = group
                wrapper.global_coordinator_rank = dist.get_global_rank(group, wrapper.coordinator_rank)
            return
        frame = frame.f_back


def new_group(of: dist.ProcessGroup | None, timeout: timedelta) -> dist.ProcessGroup:
    """Another gloo group of the same processes, all of which must call this."""
    ranks = dist.get_process_group_ranks(of)
    everyone = len(ranks) == dist.get_world_size()
    # Not ``dist.new_group``, which torch_xla replaces by a function that knows fewer options.
    new = dist.distributed_c10d.new_group
    return new(ranks, timeout=timeout, backend="gloo", use_local_synchronization=not everyone)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a group can still be used: ``destroy_process_group`` has not been called for it."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def fail_to_save(error: BaseException, group: dist.ProcessGroup | None) -> None:
    """Take part in a save that fails here with ``error``, so that the other processes learn of it.

    Raises:
        CheckpointException: always.
    """

    def fail() -> None:
        raise error

    _DistWrapper(group, True, 0).reduce_scatter("plan", fail, lambda plans: plans)


def default_store() -> dist.Store:
    """The store through which torch.distributed was set up, over a connection of its own where there is one."""
    store = dist.distributed_c10d._get_default_store()
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):
        return store


def cause(error: CheckpointException, done: str, several: bool) -> BaseException:
    """The most telling of the ranks' failures, with the rank in its message.

    Args:
        error: what DCP raised.
        done: "saved" or "loaded".
        several: whether there were other ranks.
    """
    causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
    for failure in causes.values():
        if not isinstance(failure, Exception):  # KeyboardInterrupt, SystemExit
            return failure
    telling = (ReplacedCheckpointError, CheckpointError)  # a rank that sees no replacement takes it for damage
    ranks = (rank for kind in telling for rank, c in causes.items() if isinstance(c, kind))
    rank = next(ranks, next(iter(causes)))
    failure = causes[rank]
    # A MismatchError names ranks itself.
    where = f"rank {rank}: " if several and not isinstance(failure, MismatchError) else ""
    others = f" (ranks {', '.join(str(r) for r in causes if r != rank)} failed too)" if len(causes) > 1 else ""
    if isinstance(failure, CheckpointError):
        failure.args = (f"{where}{failure}{others}", *failure.args[1:])
        return failure
    text = f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__
    if isinstance(failure, AssertionError) and done == "loaded":
        text = "there is no checkpoint there whose metadata can be read"  # DCP asserts that it has some
    return CheckpointError(f"the checkpoint could not be {done}: {where}{text}{others}")

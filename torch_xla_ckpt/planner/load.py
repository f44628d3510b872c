"""SPMDLoadPlanner: what each process reads, and how it reaches the devices."""

from __future__ import annotations

import io
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.utils import _pytree as pytree

from torch_xla_ckpt import _dcp
from torch_xla_ckpt._gc import without_collector
from torch_xla_ckpt.device import TensorAccess, access_of
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.layout import Box, ChunkIndex, Flaw, covers_exactly, find_flaws
from torch_xla_ckpt.planner.buffers import Buffers
from torch_xla_ckpt.planner.match import match
from torch_xla_ckpt.planner.objects import AllowedType, decode
from torch_xla_ckpt.planner.shards import LaidOut, lay_out
from torch_xla_ckpt.planner.tree import Leaf, flatten

logger = logging.getLogger(__name__)

# Buffers stay on the host until they have been uploaded, those of replicated tensors until the next sync. So sync, and
# wait, after this many bytes.
_UPLOAD_BYTES = 64 << 20


class SPMDLoadPlanner(LoadPlanner):
    """Loads a DCP checkpoint of any mesh in place into a state dict that may hold sharded XLA tensors.

    Pass it to ``dcp.load``. Every target keeps its own sharding: each distinct box is read once, into one host
    buffer that all local replicas share, and goes to the devices when all of the tensor's boxes are complete. Before
    anything is read, all keys are matched and every box is proven to be covered by saved chunks. Objects are set
    when the last of them has been decoded.

    A different dtype is cast, and a warning names the keys; so are keys that the checkpoint has and the target
    lacks, below the target's own top-level keys.

    Args:
        allow_types: types that objects in the checkpoint may have besides the harmless builtin, numpy, datetime,
            collections and pathlib ones. Loading a type runs its constructor or ``__setstate__``.
        trust_pickle: load any object, running whatever code the file names. Only for files you would execute.
        access: how tensors are written to where they live. The default suits every tensor; simulated hosts pass
            their own.

    Raises (inside DCP's ``CheckpointException``, as every error of a planner; ``torch_xla_ckpt.load`` unwraps it):
        MismatchError: keys are missing from the checkpoint or have another shape. All of them are listed.
        IncompleteCheckpointError: the saved chunks do not cover a box that is needed exactly once.
        UnsafeObjectError: an object has a type that is not allowed.
    """

    def __init__(
        self,
        *,
        allow_types: Sequence[AllowedType] = (),
        trust_pickle: bool = False,
        access: Callable[[torch.Tensor], TensorAccess] = access_of,
    ):
        self._allow_types = tuple(allow_types)
        self._trust_pickle = trust_pickle
        self._access_of = access
        self._lock = threading.Lock()
        self._putting = threading.Lock()
        self.planned_at = 0.0  # when planning was done, by time.perf_counter
        self.put_seconds = 0.0  # spent since then on handing tensors to their devices

    @without_collector
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if metadata is None:
            raise CheckpointError("the storage reader gave no metadata, and without it nothing can be loaded")
        saved = metadata.state_dict_metadata.items()
        self._leaves = flatten(state_dict, whole={key for key, md in saved if isinstance(md, BytesStorageMetadata)})
        found = match(self._leaves, metadata)
        found.require_complete()
        if is_coordinator:
            _warn("were cast to the target's dtype", [f"{k} ({a} -> {b})" for k, (a, b) in found.cast.items()])
            _warn("are in the checkpoint, not in the target, and were not loaded", found.unexpected)
        self._metadata = metadata
        self._object_keys = found.objects
        self._objects: dict[str, Any] = {}
        laid_out = lay_out({key: self._leaves[key].value for key in found.tensors}, self._access_of)
        self._buffers = Buffers()
        self._targets = {key: _Target(held, self._buffers) for key, held in laid_out.items()}
        self._accesses = {type(held.access): held.access for held in laid_out.values()}
        self._unfinished = 0
        self._uploading = 0
        self.put_seconds = 0.0

    @without_collector
    def create_local_plan(self) -> LoadPlan:
        items = [_dcp.read_object(key) for key in self._object_keys]
        broken: dict[str, Sequence[object]] = {}
        for key, parts in _dcp.lost(self._metadata, [*self._object_keys, *self._targets]).items():
            broken[key] = [f"{part or 'the object'} is listed, but stored in no file" for part in parts[:3]]
        for key, target in self._targets.items():
            saved = self._metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            reads, flaws = _reads(key, target.boxes, saved)
            target.expect(len(reads))
            self._unfinished += bool(reads)
            items += reads
            if flaws:
                broken[key] = flaws[:3]
        if broken:
            raise IncompleteCheckpointError(
                "the checkpoint does not hold every element that the target needs exactly once:\n  "
                + "\n  ".join(f"{key!r}: " + "; ".join(map(str, what)) for key, what in broken.items())
                + "\nNothing was loaded. Restore from another checkpoint, or take these keys out of the target",
                keys=tuple(broken),
            )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self.planned_at = time.perf_counter()
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        decoded = decode(key, value, self._allow_types, self._trust_pickle)
        with self._lock:
            self._objects[key] = decoded
            if len(self._objects) == len(self._object_keys):
                for key in self._object_keys:
                    _set_object(self._leaves[key], self._objects[key], self._access_of)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        with self._lock:
            shard = self._targets[read_item.dest_index.fqn].shard(read_item.dest_index)
        if shard.shape == read_item.lengths:
            return shard
        return shard[tuple(slice(start, start + n) for start, n in zip(read_item.dest_offsets, read_item.lengths))]

    def adopt(self, read_item: ReadItem, tensor: torch.Tensor) -> bool:
        """Take ``tensor`` itself for what ``read_item`` asks for, if that spares a copy; ``commit_tensor`` follows."""
        with self._lock:
            return self._targets[read_item.dest_index.fqn].adopt(read_item.dest_index, tensor)

    def host_bytes(self, key: str) -> int:
        """Bytes of host memory that a tensor's buffers take until it is complete."""
        if self._targets[key].needs_no_buffer:
            return 0
        layout = self._targets[key].held.layout
        return len(layout.boxes) * math.prod(layout.shard_shape) * layout.dtype.itemsize

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        with self._lock:
            target = self._targets[read_item.dest_index.fqn]
            target.waiting -= 1
            if target.waiting:
                return
        with self._putting:  # by one thread at a time, while others read on
            start = time.perf_counter()
            self._uploading += target.put()
            self._unfinished -= 1
            if self._uploading >= _UPLOAD_BYTES or not self._unfinished:
                for access in self._accesses.values():
                    access.settle()
                self._uploading = 0
            self.put_seconds += time.perf_counter() - start


class _Target:
    """A tensor being loaded: one host buffer for each distinct box, until all have arrived."""

    def __init__(self, held: LaidOut, buffers: Buffers):
        self.held = held
        self._pool = buffers
        self.boxes = held.layout.boxes
        self.waiting = 0  # reads still to come
        self._buffers: dict[Box, torch.Tensor] = {}
        self._memory: torch.Tensor | None = None  # the tensor's own, where it needs no buffer
        self._by_offset = {torch.Size(box.offsets): box for box in self.boxes}

    def expect(self, reads: int) -> None:
        """Say how many reads fill the tensor. What a single one fills is never half there, and needs no buffer."""
        self.waiting = reads
        if reads == 1:
            self._memory = self.held.access.memory(self.held.tensor)

    @property
    def needs_no_buffer(self) -> bool:
        return self._memory is not None

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        """The elements of the box at ``index``, without padding, for reading into."""
        if self._memory is not None:
            return self._memory
        assert index.offset is not None
        box = self._by_offset[index.offset]
        if box not in self._buffers:
            layout = self.held.layout
            buffer = self._pool.empty(layout.shard_shape, layout.dtype)
            # Padding is never read back, but it must not carry a previous tenant's memory to the device.
            self._buffers[box] = buffer if box.sizes == layout.shard_shape else buffer.zero_()
        return self._buffers[box][tuple(slice(n) for n in box.sizes)]

    def adopt(self, index: MetadataIndex, tensor: torch.Tensor) -> bool:
        """Use ``tensor`` as the buffer of the box at ``index``, if it is just what the device holds of it."""
        assert index.offset is not None
        box, layout = self._by_offset[index.offset], self.held.layout
        if self._memory is not None or not (
            tuple(tensor.shape) == box.sizes == layout.shard_shape and tensor.dtype == layout.dtype
        ):
            return False
        self._buffers[box] = tensor
        return True

    def put(self) -> int:
        """Hand the buffers to the devices; returns their bytes."""
        if self._memory is not None:
            return 0
        self.held.access.put(self.held.tensor, self.held.layout, self._buffers)
        nbytes = sum(buffer.nbytes for buffer in self._buffers.values())
        self._buffers = {}
        return nbytes


def _reads(key: str, boxes: Sequence[Box], saved: TensorStorageMetadata) -> tuple[list[ReadItem], list[Flaw]]:
    """The reads that fill ``boxes``, and where the saved chunks fail to cover them exactly once."""
    if _dcp.is_one_chunk(saved):
        return [_dcp.whole_read(key, saved, box) for box in boxes], []
    chunks = _dcp.boxes_of(saved)
    index, orders = ChunkIndex(chunks), _dcp.TensorReads(key, chunks)
    reads: list[ReadItem] = []
    flaws: list[Flaw] = []
    for box in boxes:
        numbers, parts = index.overlaps(box)
        if covers_exactly(box, parts):
            reads += orders.fill(box, numbers, parts)
        else:
            flaws += find_flaws(box, parts)
    return reads, flaws


def _set_object(leaf: Leaf, loaded: Any, access_of: Callable[[torch.Tensor], TensorAccess]) -> None:
    """Put a loaded object in the leaf's place.

    Tensors inside it (a tuple of tensors is one object) are loaded into the target's tensors at the same position,
    so that they stay on their devices with their sharding.
    """
    old, old_tree = pytree.tree_flatten(leaf.value)
    new, new_tree = pytree.tree_flatten(loaded)
    if old_tree == new_tree:
        for place, (target, value) in enumerate(zip(old, new)):
            if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor) and target.shape == value.shape:
                _copy_into(target, value, access_of)
                new[place] = target
        loaded = pytree.tree_unflatten(new, new_tree)
    leaf.replace(loaded)


def _copy_into(target: torch.Tensor, value: torch.Tensor, access_of: Callable[[torch.Tensor], TensorAccess]) -> None:
    held = lay_out({"": target}, access_of)[""]
    whole = _Target(held, Buffers())
    for box in whole.boxes:
        whole.shard(MetadataIndex("", box.offsets)).copy_(value[box.slices])
    if whole.boxes:
        whole.put()


def _warn(what: str, keys: Sequence[str]) -> None:
    if keys:
        logger.warning("these keys %s: %s", what, ", ".join(keys))

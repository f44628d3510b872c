"""One load in one process: matched keys, planned reads, arriving data, and the completion of the target."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.device import Placement, make
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.planner.match import match
from torch_xla_ckpt.planner.objects import updated_object
from torch_xla_ckpt.planner.optimizers import OptimizerPaths, is_primed
from torch_xla_ckpt.planner.policy import Policy
from torch_xla_ckpt.planner.reads import ReadPlans
from torch_xla_ckpt.planner.saved import paths_of
from torch_xla_ckpt.planner.targets import TensorTarget, tie_shared
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.reports import LoadReport, Outcome
from torch_xla_ckpt.serialization import AllowedType
from torch_xla_ckpt.state import Buffers, StateDictEditor, flatten, lay_out, require_targets

# Buffers stay in host memory until the runtime has copied them to the devices. After this many bytes, wait for that.
_UPLOAD_BYTES = 64 << 20

Place = Callable[[str, torch.Size, torch.dtype], Placement | None]
"""Chooses where a tensor is created, from its key, shape and dtype; None for host memory."""


@dataclass(frozen=True)
class LoadOptions:
    """The options of a ``SPMDLoadPlanner``; its docstring explains them."""

    policy: Policy
    placement: Place | None
    allow_types: tuple[AllowedType, ...]
    trust_pickle: bool
    access_of: Callable[[torch.Tensor], TensorAccess]


class OngoingLoad:
    """One load of a checkpoint into a state dict. Several threads may hand over data at once.

    Args:
        state_dict: the target.
        metadata: the checkpoint's metadata.
        options: the planner's options.

    Attributes:
        metadata: the checkpoint's metadata.
        match: what this process loads, creates and refuses.
        unsharded_state: keys of optimizer state that were created whole in host memory, although the target's
            tensors are sharded on XLA devices.
        outcomes: the outcome of every key, merged over all ranks; empty before ``begin_reading``.
        planned_at: time of ``begin_reading``, by ``time.perf_counter``.
        put_seconds: seconds spent on moving tensors to their devices.

    Raises:
        CheckpointError: the options do not fit the keys, a tensor cannot be loaded in place, or ``placement`` does not
            fit a tensor.
    """

    def __init__(self, state_dict: dict[str, Any], metadata: Metadata, options: LoadOptions):
        self._started_at = time.perf_counter()
        self._options = options
        self.metadata = metadata
        saved = metadata.state_dict_metadata
        paths = paths_of(metadata)
        optimizers = OptimizerPaths(paths)
        self._leaves = flatten(state_dict, whole={k for k, md in saved.items() if isinstance(md, BytesStorageMetadata)})
        self._editor = StateDictEditor(state_dict, optimizers.keyed_by_integers)
        self.match = match(state_dict, self._leaves, self._editor, metadata, options.policy)
        found = self.match
        new = {*found.created, *found.replaced}
        tensors = {key: self._leaves[key].value for key in found.tensors if key not in new}
        self._created: dict[str, Any] = {} if found.mismatches else self._create(new)
        handles = lay_out(tensors | self._created, options.access_of)
        require_targets(tensors | self._created)
        buffers = Buffers()
        self._targets = {key: TensorTarget(handle, buffers) for key, handle in handles.items()}
        tie_shared(self._targets)
        self._accesses = {type(handle.access): handle.access for handle in handles.values()}
        self.unsharded_state = self._unsharded_state(state_dict, optimizers)
        self._objects: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._put_lock = threading.Lock()
        self._unfinished_tensors = 0
        self._bytes_uploading = 0
        self._completed_at: float | None = None
        self.outcomes: Mapping[str, Outcome] = {}
        self.planned_at = 0.0
        self.put_seconds = 0.0

    def _unsharded_state(self, state_dict: Mapping[str, Any], optimizers: OptimizerPaths) -> tuple[str, ...]:
        layouts = [
            target.handle.layout for target in self._targets.values() if target.handle.tensor.device.type == "xla"
        ]
        if self._options.placement is not None or all(layout.shard_shape == layout.shape for layout in layouts):
            return ()
        # Step counts have no dimensions. Optimizers keep them in host memory.
        created = [key for key in self.match.created if key in self._created and self._created[key].ndim]
        state_paths = {key: optimizers.state_path(self.match.created[key]) for key in created}
        return tuple(key for key, path in state_paths.items() if path is not None and not is_primed(state_dict, path))

    def _create(self, new: set[str]) -> dict[str, Any]:
        """Create the tensors that the target lacks, or has a placeholder for."""
        created = {}
        for key, source in self.match.tensors.items():
            if key not in new:
                continue
            saved = self._saved_tensor(source)
            shape, dtype = torch.Size(saved.size), saved.properties.dtype
            placement = None if self._options.placement is None else self._options.placement(key, shape, dtype)
            try:
                created[key] = make(shape, dtype, placement)
            except ValueError as error:
                raise CheckpointError(
                    f"cannot create {key!r} of shape {tuple(shape)} as placement= says: {error}. Nothing was loaded. "
                    "Let placement= return a device, a tensor, or a mesh and a partition spec that fit this key"
                ) from error
        return created

    def _saved_tensor(self, source: str) -> TensorStorageMetadata:
        saved = self.metadata.state_dict_metadata[source]
        assert isinstance(saved, TensorStorageMetadata)
        return saved

    def plan_reads(self) -> tuple[list[ReadItem], dict[str, Outcome]]:
        """Return this process's reads, and its outcome of every key.

        Raises:
            IncompleteCheckpointError: the checkpoint does not hold every needed element exactly once.
        """
        found = self.match
        outcomes = dict(found.outcomes)
        items = [_dcp.read_object(key, source) for key, source in found.objects.items()]
        sources = [*found.objects.values(), *found.tensors.values()]
        broken = {key: missing[:3] for key, missing in _dcp.unstored(self.metadata, sources).items()}
        plans = ReadPlans()
        for key, target in self._targets.items():
            source = found.tensors[key]
            reads = plans.plan(key, source, target.boxes, self._saved_tensor(source))
            target.expect(len(reads.items))
            self._unfinished_tensors += bool(reads.items)
            items += reads.items
            if reads.flaws:
                broken[source] = [str(flaw) for flaw in reads.flaws[:3]]
            if reads.resharded and outcomes[key].status == "loaded":
                outcomes[key] = replace(outcomes[key], resharded=True)
        if broken:
            raise IncompleteCheckpointError(
                "the checkpoint does not hold every element that the target needs exactly once:\n  "
                + "\n  ".join(f"{key!r}: " + "; ".join(flaws) for key, flaws in broken.items())
                + "\nNothing was loaded. Restore from another checkpoint, or take these keys out of the target",
                keys=tuple(broken),
            )
        return items, outcomes

    def begin_reading(self, outcomes: Mapping[str, Outcome] | None) -> None:
        """Note that planning is done.

        Args:
            outcomes: the merged outcomes of all ranks; None takes those of this process.
        """
        self.outcomes = outcomes or self.match.outcomes
        self.planned_at = time.perf_counter()
        self._finish_if_complete()

    def receive_object(self, key: str, value: Any) -> None:
        """Take a decoded object. Objects are set when the whole load is complete."""
        with self._lock:
            self._objects[key] = value
        self._finish_if_complete()

    def buffer(self, read_item: ReadItem) -> torch.Tensor:
        """Return the memory to copy the data of ``read_item`` into."""
        with self._lock:
            shard = self._targets[read_item.dest_index.fqn].shard(read_item.dest_index)
        if shard.shape == read_item.lengths:
            return shard
        return shard[tuple(slice(start, start + n) for start, n in zip(read_item.dest_offsets, read_item.lengths))]

    def adopt(self, read_item: ReadItem, tensor: torch.Tensor) -> bool:
        """Use the memory of ``tensor`` as the buffer of a read, or return False."""
        with self._lock:
            return self._targets[read_item.dest_index.fqn].adopt(read_item.dest_index, tensor)

    def buffer_bytes(self, key: str) -> int:
        """Return the host memory in bytes that the tensor's buffers take until it is complete."""
        target = self._targets[key]
        layout = target.handle.layout
        return (
            0 if target.needs_no_buffer else len(layout.boxes) * math.prod(layout.shard_shape) * layout.dtype.itemsize
        )

    def commit(self, read_item: ReadItem) -> None:
        """Count a read as done. After the last read of a tensor, move the tensor to its devices."""
        with self._lock:
            target = self._targets[read_item.dest_index.fqn]
            target.pending_reads -= 1
            if target.pending_reads:
                return
        with self._put_lock:  # one thread at a time, while the others keep reading
            start = time.perf_counter()
            self._bytes_uploading += target.put()
            if self._bytes_uploading >= _UPLOAD_BYTES or self._unfinished_tensors == 1:
                for access in self._accesses.values():
                    access.settle()
                self._bytes_uploading = 0
            self._unfinished_tensors -= 1
            self.put_seconds += time.perf_counter() - start
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        """Set objects and insert created values, once nothing is left in this process that could fail."""
        with self._lock:
            is_complete = not self._unfinished_tensors and len(self._objects) == len(self.match.objects)
            if self._completed_at is not None or not is_complete:
                return
            try:
                self._edit_state_dict()
            except BaseException:
                self._editor.undo()
                raise
            self._completed_at = time.perf_counter()

    def _edit_state_dict(self) -> None:
        for key, value in self._objects.items():
            if key in self.match.created:
                self._created[key] = value
            else:
                leaf = self._leaves[key]
                self._editor.replace(leaf, updated_object(leaf.value, value, self._options.access_of))
        for key in self.match.replaced:
            self._editor.replace(self._leaves[key], self._created[key])
        self._editor.insert((path, self._created[key]) for key, path in self.match.created.items())

    def undo(self) -> None:
        """Remove created values from the target, and put its old objects back. Loaded tensors keep their new data."""
        self._editor.undo()

    @property
    def report(self) -> LoadReport | None:
        """The report, without bytes, which the planner does not see; None while the load is not complete."""
        if self._completed_at is None:
            return None
        return LoadReport(
            outcomes=self.outcomes,
            bytes_needed=None,
            bytes_read=None,
            plan_seconds=self.planned_at - self._started_at,
            read_seconds=max(0.0, self._completed_at - self.planned_at - self.put_seconds),
            put_seconds=self.put_seconds,
        )

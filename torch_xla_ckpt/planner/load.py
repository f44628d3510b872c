"""SPMDLoadPlanner: what each process reads, and how it reaches the devices."""

from __future__ import annotations

import io
import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.utils import _pytree as pytree

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.device import Placement, access_of, alias_of, data_changed, make
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError, Mismatch
from torch_xla_ckpt.layout import Box, ChunkIndex, Flaw, covers_exactly, find_flaws
from torch_xla_ckpt.planner.match import (
    LOADED,
    match,
    merged,
    mismatch_error,
    paths_of,
    require_same_kept_keys,
    unexpected_mismatches,
)
from torch_xla_ckpt.planner.policy import Dtype, Missing, Policy, Rename, Shape, Unexpected
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.reports import Outcome
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.serialization import AllowedType, decode
from torch_xla_ckpt.state import Buffers, Leaf, Path, StateDictEditor, TensorHandle, flatten, lay_out, require_targets

logger = logging.getLogger(__name__)

# Buffers stay on the host until they have been uploaded, those of replicated tensors until the next sync. So sync, and
# wait, after this many bytes.
_UPLOAD_BYTES = 64 << 20


Place = Callable[[str, torch.Size, torch.dtype], Placement | None]


@dataclass(frozen=True)
class LocalMatch:
    """What a process tells the coordinator beside its items: its outcomes, and what makes the load fail."""

    outcomes: Mapping[str, Outcome]
    mismatches: Sequence[Mismatch]
    kept: Sequence[Mismatch] = ()


class SPMDLoadPlanner(LoadPlanner):
    """Loads a DCP checkpoint of any mesh in place into a state dict that may hold sharded XLA tensors.

    Pass it to ``dcp.load``. Every target keeps its own sharding: each distinct box is read once, into one host
    buffer that all local replicas share, and goes to the devices when all of the tensor's boxes are complete. Before
    anything is read, all keys are matched and every box is proven to be covered by saved chunks. Objects are set, and
    what the target lacked is inserted, when everything else is complete. ``docs/restoring.md`` has examples.

    Args:
        missing: what to do about keys of the target that the checkpoint lacks. "error": fail, listing all of them;
            "warn": keep the target's values and name the keys; "keep": keep them silently.
        unexpected: what to do about keys of the checkpoint that the target lacks, though it names the part of the tree
            they lie in. "restore": create the object, or the tensor, and insert it in the target's nested dicts and
            lists; "warn": leave it out and name it; "error": fail, listing all of them; "ignore": leave it out. A
            target that names only "model" does not request what lies in "optim". In a flat target of tensors nothing is
            created; "restore" warns there.
        dtype: "cast" to the target's, naming the keys, or "error".
        shape: what to do about tensors that have another shape in the checkpoint. "error": fail, listing all of them;
            "keep": keep the target's values, read nothing for these keys, and name them in the report and in a
            warning. A tensor where the checkpoint has an object is an error in either case.
        rename: new names for keys of the checkpoint: a mapping from saved keys to keys of the target, or a function
            from a saved key to its new one or None. Several new names for one key fill several tensors (tied weights).
            What wrappers put into names (``_orig_module``, ``_orig_mod``, ``module``) need not be named.
        only, exclude: globs of keys to load, and of keys to leave alone. Nothing that they leave out is missing or
            unexpected.
        placement: where tensors are created: a function of key, shape and dtype that returns a device, a mesh and a
            partition spec, a tensor to be like, or None for host memory.
        allow_types: types that objects in the checkpoint may have besides the harmless builtin, numpy, datetime,
            collections and pathlib ones. Loading a type runs its constructor or ``__setstate__``.
        trust_pickle: load any object, running whatever code the file names. Only for files you would execute.
        access: how tensors are written to where they live. The default suits every tensor; simulated hosts pass
            their own.

    Attributes:
        outcomes: what became of every key, by key; the same on every rank once planning is done.

    Raises (inside DCP's ``CheckpointException``, as every error of a planner; ``torch_xla_ckpt.load`` unwraps it):
        MismatchError: keys do not fit, and the policy does not allow it. All of them are listed.
        IncompleteCheckpointError: the saved chunks do not cover a box that is needed exactly once.
        UnsafeObjectError: an object has a type that is not allowed.
        CheckpointError: ``rename``, ``only``, ``exclude`` or ``placement`` name what is not there.
    """

    def __init__(
        self,
        *,
        missing: Missing = "error",
        unexpected: Unexpected = "restore",
        dtype: Dtype = "cast",
        shape: Shape = "error",
        rename: Rename | None = None,
        only: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        placement: Place | None = None,
        allow_types: Sequence[AllowedType] = (),
        trust_pickle: bool = False,
        access: Callable[[torch.Tensor], TensorAccess] = access_of,
    ):
        self._policy = Policy(missing, unexpected, dtype, rename, _patterns(only), _patterns(exclude), shape)
        self._placement = placement
        self._allow_types = tuple(allow_types)
        self._trust_pickle = trust_pickle
        self._access_of = access
        self._lock = threading.Lock()
        self._putting = threading.Lock()
        self.outcomes: Mapping[str, Outcome] = {}
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
        saved = metadata.state_dict_metadata
        self._leaves = flatten(state_dict, whole={k for k, md in saved.items() if isinstance(md, BytesStorageMetadata)})
        paths = paths_of(metadata)
        self._growth = StateDictEditor(state_dict, lambda path: _is_optimizer_state(path, paths))
        found = match(state_dict, self._leaves, self._growth, metadata, self._policy)
        self._metadata = metadata
        self._match = found
        self._objects: dict[str, Any] = {}
        self._created: dict[str, Any] = {}
        self._completed = False
        new = {*found.created, *found.replaced}
        tensors = {key: self._leaves[key].value for key in found.tensors if key not in new}
        if not found.mismatches:
            tensors |= self._made({key: source for key, source in found.tensors.items() if key in new})
        laid_out = lay_out(tensors, self._access_of)
        require_targets(tensors)
        self._buffers = Buffers()
        self._targets = {key: _Target(held, self._buffers) for key, held in laid_out.items()}
        _join_aliases(self._targets)
        self._accesses = {type(held.access): held.access for held in laid_out.values()}
        self._unfinished = 0
        self._uploading = 0
        self.put_seconds = 0.0

    def _made(self, sources: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """New tensors for keys that the target lacks, or has a placeholder for; given with their saved keys."""
        for key, source in sources.items():
            saved = self._metadata.state_dict_metadata[source]
            assert isinstance(saved, TensorStorageMetadata)
            shape, dtype = torch.Size(saved.size), saved.properties.dtype
            place = None if self._placement is None else self._placement(key, shape, dtype)
            try:
                self._created[key] = make(shape, dtype, place)
            except ValueError as error:
                raise CheckpointError(
                    f"cannot create {key!r}, of shape {tuple(shape)}, where placement= says: {error}. Nothing was "
                    "loaded"
                ) from error
        return self._created

    @without_collector
    def create_local_plan(self) -> LoadPlan:
        found = self._match
        outcomes = dict(found.outcomes)
        if found.mismatches:  # the coordinator says so, for all processes
            return LoadPlan([], planner_data=LocalMatch(outcomes, found.mismatches))
        items = [_dcp.read_object(key, source) for key, source in found.objects.items()]
        broken: dict[str, Sequence[object]] = {}
        for key, parts in _dcp.lost(self._metadata, [*found.objects.values(), *found.tensors.values()]).items():
            broken[key] = [f"{part or 'the object'} is listed, but stored in no file" for part in parts[:3]]
        for key, target in self._targets.items():
            source = found.tensors[key]
            saved = self._metadata.state_dict_metadata[source]
            assert isinstance(saved, TensorStorageMetadata)
            reads, flaws, alike = _reads(key, source, target.boxes, saved)
            target.expect(len(reads))
            self._unfinished += bool(reads)
            items += reads
            if flaws:
                broken[source] = flaws[:3]
            if not alike and outcomes[key].status == "loaded":
                outcomes[key] = replace(outcomes[key], resharded=True)
        if broken:
            raise IncompleteCheckpointError(
                "the checkpoint does not hold every element that the target needs exactly once:\n  "
                + "\n  ".join(f"{key!r}: " + "; ".join(map(str, what)) for key, what in broken.items())
                + "\nNothing was loaded. Restore from another checkpoint, or take these keys out of the target",
                keys=tuple(broken),
            )
        return LoadPlan(items, planner_data=LocalMatch(outcomes, (), found.kept))

    @without_collector
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        local: list[LocalMatch] = [plan.planner_data for plan in global_plan]
        outcomes = merged(one.outcomes for one in local)
        mismatches: dict[Mismatch, tuple[int, ...]] = {}
        for rank, one in enumerate(local):
            for mismatch in one.mismatches:
                mismatches[mismatch] = (*mismatches.get(mismatch, ()), rank)
        if self._policy.unexpected == "error":
            mismatches |= dict.fromkeys(unexpected_mismatches(outcomes, self._metadata), ())
        if mismatches:
            raise mismatch_error(mismatches, outcomes, len(local))
        require_same_kept_keys([one.outcomes for one in local], [one.kept for one in local])
        self._say(outcomes)
        return [replace(plan, planner_data=outcomes) for plan in global_plan]

    def _say(self, outcomes: Mapping[str, Outcome]) -> None:
        odd = {key: outcome for key, outcome in outcomes.items() if outcome is not LOADED}

        def keys(status: str) -> list[str]:
            return [key for key, outcome in odd.items() if outcome.status == status]

        casts = [(key, outcome.cast) for key, outcome in odd.items() if outcome.cast]
        _warn("were cast to the target's dtype", [f"{key} ({a} -> {b})" for key, (a, b) in casts])
        shapes = [(key, outcome.shapes) for key, outcome in odd.items() if outcome.shapes]
        _warn(
            "have another shape in the checkpoint, and keep the target's values",
            [f"{key} (target {target}, checkpoint {saved})" for key, (saved, target) in shapes],
        )
        if self._policy.missing == "warn":
            _warn("are in the target, not in the checkpoint, and were left as they are", keys("missing"))
        if self._policy.unexpected != "ignore":
            _warn("are in the checkpoint, not in the target, and were not loaded", keys("unexpected"))
        if created := keys("created"):
            logger.info("these keys were not in the target, and were created: %s", ", ".join(created))

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        self.outcomes = central_plan.planner_data or self._match.outcomes
        self.planned_at = time.perf_counter()
        self._complete_if_all_is_there()
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        decoded = decode(key, value, self._allow_types, self._trust_pickle)
        with self._lock:
            self._objects[key] = decoded
        self._complete_if_all_is_there()

    def _complete_if_all_is_there(self) -> None:
        """Set objects and insert what was created, when nothing is left that could fail in this process."""
        with self._lock:
            if self._completed or self._unfinished or len(self._objects) < len(self._match.objects):
                return
            self._completed = True
            try:
                for key, value in self._objects.items():
                    if key in self._match.created:
                        self._created[key] = value
                    else:
                        leaf = self._leaves[key]
                        self._growth.replace(leaf, _loaded(leaf, value, self._access_of))
                for key in self._match.replaced:
                    self._growth.replace(self._leaves[key], self._created[key])
                self._growth.insert((path, self._created[key]) for key, path in self._match.created.items())
            except BaseException:
                self._growth.undo()
                raise

    def undo(self) -> None:
        """Take out of the target what was created, and put its objects back; tensors stay as they are."""
        if growth := getattr(self, "_growth", None):
            growth.undo()

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

    def buffer_bytes(self, key: str) -> int:
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
            if self._uploading >= _UPLOAD_BYTES or self._unfinished == 1:
                for access in self._accesses.values():
                    access.settle()
                self._uploading = 0
            self._unfinished -= 1
            self.put_seconds += time.perf_counter() - start
        self._complete_if_all_is_there()


class _Target:
    """A tensor being loaded: one host buffer for each distinct box, until all have arrived."""

    def __init__(self, held: TensorHandle, buffers: Buffers):
        self.held = held
        self._pool = buffers
        self.boxes = held.layout.boxes
        self.waiting = 0  # reads still to come
        self.aliases: _Aliases | None = None
        self._buffers: dict[Box, torch.Tensor] = {}
        self._memory: torch.Tensor | None = None  # the tensor's own, where it needs no buffer
        self._by_offset = {torch.Size(box.offsets): box for box in self.boxes}

    def expect(self, reads: int) -> None:
        """Say how many reads fill the tensor. What a single one fills is never half there, and needs no buffer."""
        self.waiting = reads
        if reads == 1 and self.aliases is None:
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

    def equals(self, other: _Target) -> bool:
        """Whether the buffers of two complete targets of one layout are alike, bit for bit."""
        return all(torch.equal(_bits(self._buffers[box]), _bits(other._buffers[box])) for box in self.boxes)

    def drop(self) -> None:
        """Let the buffers go."""
        self._buffers = {}

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
            data_changed(self.held.tensor)
            return 0
        return self._put() if self.aliases is None else self.aliases.put(self)

    def _put(self) -> int:
        self.held.access.put(self.held.tensor, self.held.layout, self._buffers)
        nbytes = sum(buffer.nbytes for buffer in self._buffers.values())
        self._buffers = {}
        return nbytes


class _Aliases:
    """Keys of the target that are one tensor, such as tied weights.

    The checkpoint may have other values for each. As with ``load_state_dict``, the last key's are the tensor's in the
    end; here a warning says so.

    Args:
        targets: by key, in the target's order.
    """

    def __init__(self, targets: Mapping[str, _Target]):
        self._targets = targets
        self._waiting = len(targets)

    def put(self, _: _Target) -> int:
        """Take note that one more key is complete; with the last one, hand the buffers to the devices."""
        self._waiting -= 1
        if self._waiting:
            return 0
        *others, (chosen, target) = self._targets.items()
        other = [key for key, twin in others if not target.equals(twin)]
        if other:
            logger.warning(
                "these keys are one tensor in the target, and the checkpoint has different values for them: %s. The "
                "tensor has the values of %r. To load the others too, give each key a tensor of its own",
                ", ".join([*other, chosen]),
                chosen,
            )
        for twin in self._targets.values():
            if twin is not target:
                twin.drop()
        return target._put()


def _join_aliases(targets: Mapping[str, _Target]) -> None:
    same: dict[Hashable, dict[str, _Target]] = {}
    for key, target in targets.items():
        same.setdefault(alias_of(target.held.tensor), {})[key] = target
    for twins in same.values():
        if len(twins) > 1:
            aliases = _Aliases(twins)
            for target in twins.values():
                target.aliases = aliases


def _reads(
    key: str, source: str, boxes: Sequence[Box], saved: TensorStorageMetadata
) -> tuple[list[ReadItem], list[Flaw], bool]:
    """The reads that fill ``boxes``, where saved chunks fail to cover them exactly once, and whether they are chunks.

    Args:
        key, source: of the target and of the checkpoint.
        boxes: of the target.
        saved: the tensor.
    """
    if _dcp.is_one_chunk(saved):
        whole = all(box.sizes == tuple(saved.size) for box in boxes)
        return [_dcp.whole_read(key, source, saved, box) for box in boxes], [], whole
    chunks = _dcp.boxes_of(saved)
    index, orders = ChunkIndex(chunks), _dcp.TensorReads(key, source, chunks)
    reads: list[ReadItem] = []
    flaws: list[Flaw] = []
    alike = True
    for box in boxes:
        numbers, parts = index.overlaps(box)
        if covers_exactly(box, parts):
            reads += orders.fill(box, numbers, parts)
            alike = alike and len(numbers) == 1 and tuple(saved.chunks[int(numbers[0])].sizes) == box.sizes
        else:
            flaws += find_flaws(box, parts)
    return reads, flaws, alike


def _loaded(leaf: Leaf, loaded: Any, access_of: Callable[[torch.Tensor], TensorAccess]) -> Any:
    """What takes a leaf's place.

    Tensors inside it (a tuple of tensors is one object) are loaded into the target's tensors at the same position,
    so that they stay on their devices with their sharding.
    """
    if type(loaded) is dict and not loaded and isinstance(leaf.value, Mapping) and not leaf.value:
        return leaf.value
    try:
        old, tree = pytree.tree_flatten(leaf.value)
        if not any(isinstance(one, torch.Tensor) for one in old):
            return loaded
        new = tree.flatten_up_to(loaded)  # looks no further into what was loaded than into the target
    except ValueError:  # another structure
        return loaded
    except RecursionError:  # deeper than torch can walk, or a list that contains itself
        return loaded
    adopted = False
    for place, (target, value) in enumerate(zip(old, new)):
        if not isinstance(target, torch.Tensor) or not isinstance(value, torch.Tensor):
            continue
        if not any(map(_is_more_than_elements, (target, value))) and target.shape == value.shape:
            copy_into([(target, value)], access_of)
            new[place] = target
            adopted = True
    return tree.unflatten(new) if adopted else loaded


def _is_more_than_elements(tensor: torch.Tensor) -> bool:
    """Whether the elements alone do not make a tensor: a quantized one, say, has a scale too."""
    return tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _is_optimizer_state(path: Path, paths: Mapping[str, Path]) -> bool:
    """Whether a mapping holds the state of an optimizer's parameters, which torch numbers.

    Only for checkpoints that do not say which keys are integers: all but ours.
    """
    if not path or path[-1] != "state" or any(isinstance(e, _dcp.IntegerKey) for p in paths.values() for e in p):
        return False
    groups = (*path[:-1], "param_groups")
    return any(tuple(other[: len(groups)]) == groups for other in paths.values())


def _patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def copy_into(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], access_of: Callable[[torch.Tensor], TensorAccess]
) -> None:
    """Copy host tensors into targets that may be sharded.

    Args:
        pairs: of a target and the whole tensor.
        access_of: how targets are written to.
    """
    targets = {str(number): target for number, (target, _) in enumerate(pairs)}
    laid_out = lay_out(targets, access_of)
    require_targets(targets)
    for held, (_, value) in zip(laid_out.values(), pairs):
        whole = _Target(held, Buffers())
        for box in whole.boxes:
            whole.shard(MetadataIndex("", box.offsets)).copy_(value[box.slices])
        if whole.boxes:
            whole.put()


def _warn(what: str, keys: Sequence[str]) -> None:
    if keys:
        logger.warning("these keys %s: %s", what, ", ".join(keys))

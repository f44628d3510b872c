"""explain: what each process of a job would read from a checkpoint, before the job starts."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.inspecting.folding import fold
from torch_xla_ckpt.inspecting.matching import KeyChange, matched
from torch_xla_ckpt.inspecting.meshes import MeshPlan
from torch_xla_ckpt.inspecting.opening import open_checkpoint
from torch_xla_ckpt.inspecting.overheads import chunk_overhead
from torch_xla_ckpt.inspecting.reading import Values, stored
from torch_xla_ckpt.inspecting.targets import target_of
from torch_xla_ckpt.inspecting.text import plural, shown, table
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.reports import format_bytes
from torch_xla_ckpt.storage import PathLike, planned_bytes

_BUDGET = 1 << 30  # bytes; ``ShardReader``'s default for what is read and not committed yet
_OVER_READ = 1.5  # bytes read over bytes needed from which a warning is due
_WORTH_REWRITING = 1.25  # bytes read now over bytes read after 'xc convert' from which that is advised


@dataclass(frozen=True)
class ProcessPlan:
    """What one process would do.

    Args:
        process: its number.
        devices: numbers of its devices.
        reads: number of regions of saved chunks that it reads.
        bytes_needed: bytes of the distinct boxes of its devices, and of all objects.
        bytes_read: bytes read from data files; whole blocks, where the checkpoint has checksums.
        bytes_put: bytes of the shards that it hands to its devices, with padding and copies.
        host_bytes: the most host memory in bytes that reading takes, at the default memory budget.
    """

    process: int
    devices: tuple[int, ...]
    reads: int
    bytes_needed: int
    bytes_read: int
    bytes_put: int
    host_bytes: int


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor would be cut.

    Args:
        key: the key in the checkpoint.
        shape: the tensor's shape.
        saved: the stored chunks.
        needed: the distinct boxes that devices need.
        spec: the partition spec, in words.
    """

    key: str
    shape: tuple[int, ...]
    saved: tuple[Box, ...] = field(repr=False)
    needed: tuple[Box, ...] = field(repr=False)
    spec: str


@dataclass(frozen=True)
class Explanation:
    """What a job would read. ``print`` shows tables.

    Args:
        path: the checkpoint's folder.
        mesh: the mesh's axes and their sizes.
        processes: one plan for each process.
        tensors: how each tensor would be cut, in saved order.
        changes: keys that differ between the checkpoint and the target; empty without a target.
        warnings: what to look at before the job starts, in sentences.
    """

    path: str
    mesh: Mapping[str, int]
    processes: tuple[ProcessPlan, ...]
    tensors: tuple[TensorPlan, ...] = field(repr=False)
    changes: tuple[KeyChange, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        lines = [f"{shown(self.path)} onto {axes}"]
        rows = [
            (
                str(one.process),
                _range(one.devices),
                format_bytes(one.bytes_needed),
                format_bytes(one.bytes_read),
                f"{one.bytes_read / one.bytes_needed:.2f}" if one.bytes_needed else "",
                format_bytes(one.bytes_put),
                format_bytes(one.host_bytes),
                f"{one.reads:,}",
            )
            for one in self.processes
        ]
        head = ("process", "devices", "needs", "reads", "reads/needs", "puts", "host memory", "regions")
        lines.append(table(head, rows, set(range(8)) - {1}))
        if self.changes:
            changed = fold(self.changes, lambda one: one.key, lambda one: one[1:])
            cells = [
                (line.members[0].change, line.members[0].saved, line.members[0].target, line.name) for line in changed
            ]
            lines.append(table(("", "saved", "target", "key"), cells))
        lines += [textwrap.fill(f"note: {shown(one)}", 80, subsequent_indent="  ") for one in self.warnings]
        return "\n".join(lines)


def explain(
    path: PathLike,
    mesh: str,
    specs: Sequence[str] = (),
    *,
    processes: int = 1,
    against: PathLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Explanation:
    """Return what each process of a job would read, put and need in host memory. Reads no data.

    Args:
        path: a checkpoint, as for ``inspect``.
        mesh: the mesh's axes, from the outermost, with their sizes: "fsdp=2,tensor=4".
        specs: the axes that cut the dimensions of keys: "*.weight=fsdp,tensor". "-" leaves a dimension whole. The first
            glob that matches a key counts; other keys are replicated.
        processes: number of processes, which share the devices in order. Default 1.
        against: the target: a checkpoint or model whose keys, shapes and dtypes the job would load into; or a
            ``config.json`` of transformers, which must be installed. Default: the keys of the checkpoint itself.
        storage_options: options of the fsspec filesystem behind URLs. Default: none.

    Raises:
        CheckpointError: there is no checkpoint, or the mesh, a spec or the number of processes does not fit.
    """
    plan = MeshPlan.parse(mesh, specs)
    if processes < 1 or plan.devices % processes:
        raise CheckpointError(f"{plan.devices} devices cannot be shared evenly by {processes} processes")
    checkpoint = open_checkpoint(path, storage_options)
    values = Values(checkpoint)
    saved = values.metadata.state_dict_metadata
    created, changes, left = [], [], []
    chosen = list(saved)
    if against is not None:
        found = matched(target_of(against, values.metadata, storage_options), values.metadata)
        created = [source for key, source in found.sources.items() if key in found.created]
        chosen = [one for key, one in found.sources.items() if key not in found.created]
        changes, left = found.changes, found.not_requested
    tensors = {key: one for key in chosen if isinstance(one := saved[key], TensorStorageMetadata)}
    if unused := plan.unused(list(tensors)):
        raise CheckpointError(f"no tensor matches {', '.join(map(repr, unused))}. 'xc ls PATH' lists the keys")
    boxes = plan.boxes_of({key: tuple(one.size) for key, one in tensors.items()})
    whole = [*created, *(key for key in chosen if key not in tensors)]
    share = plan.devices // processes
    planned = [
        _process(values, plan, number, range(number * share, (number + 1) * share), tensors, boxes, whole)
        for number in range(processes)
    ]
    plans = [one for one, _ in planned]
    return Explanation(
        path=checkpoint.location.url,
        mesh=dict(plan.axes),
        processes=tuple(plans),
        tensors=tuple(
            TensorPlan(
                key,
                tuple(one.size),
                tuple(map(_dcp.box_of, one.chunks)),
                tuple(box for box in dict.fromkeys(boxes[key]) if box.volume),
                plan.describe(key, one.size),
            )
            for key, one in tensors.items()
        ),
        changes=tuple(changes),
        warnings=tuple(_warnings(planned, changes, left, plan, tensors)),
    )


def _process(
    values: Values,
    plan: MeshPlan,
    number: int,
    devices: range,
    tensors: Mapping[str, TensorStorageMetadata],
    boxes: Mapping[str, Sequence[Box]],
    whole: Sequence[str],
) -> tuple[ProcessPlan, float]:
    """Plan the reads of one process: its boxes of tensors, and keys that every process reads whole.

    Returns:
        The plan, and the bytes that the process would read if the boxes that it needs were the stored chunks.
    """
    items: list[ReadItem] = []
    needed = put = largest = regions = 0
    for key in whole:
        saved = values.metadata.state_dict_metadata[key]
        if isinstance(saved, TensorStorageMetadata):
            box = Box.whole(saved.size)
            items += _reads(values, key, [box])
            regions += 1
            needed += box.volume * saved.properties.dtype.itemsize
        else:
            items.append(_dcp.read_object(key, key))
            needed += stored(values.metadata, key).length
    for key, saved in tensors.items():
        itemsize = saved.properties.dtype.itemsize
        own = [box for box in dict.fromkeys(boxes[key][device] for device in devices) if box.volume]
        items += _reads(values, key, own)
        regions += len(own)
        needed += sum(box.volume for box in own) * itemsize
        shard = math.prod(plan.shard_shape(key, saved.size)) * itemsize
        put += shard * len(devices)
        chunk = max((math.prod(one.sizes) * itemsize for one in saved.chunks), default=0)
        largest = max(largest, shard * len(own) + chunk)
    read = planned_bytes(items, values.metadata)
    host = min(needed + largest, max(_BUDGET, largest))
    fitted = needed + regions * chunk_overhead(items, values.metadata)
    return ProcessPlan(number, tuple(devices), len(items), needed, read, put, host), fitted


def _reads(values: Values, key: str, boxes: Sequence[Box]) -> Sequence[ReadItem]:
    planned = values.planner(key).plan(boxes)
    if planned.flaws:
        raise IncompleteCheckpointError(
            f"{key!r} cannot be loaded: {'; '.join(map(str, planned.flaws[:3]))} in its chunks. 'xc verify' lists all "
            "such keys. Restore from another checkpoint",
            [key],
        )
    return planned.items


def _warnings(
    plans: Sequence[tuple[ProcessPlan, float]],
    changes: Sequence[KeyChange],
    left: Sequence[str],
    plan: MeshPlan,
    tensors: Mapping[str, Any],
) -> list[str]:
    notes = []
    most, fitted = max(plans, key=lambda one: one[0].bytes_read / max(one[0].bytes_needed, 1))
    if most.bytes_needed and most.bytes_read > _OVER_READ * most.bytes_needed:
        times = f"process {most.process} reads {most.bytes_read / most.bytes_needed:.1f} times what it needs"
        if most.bytes_read > _WORTH_REWRITING * fitted:
            notes.append(
                f"{times}, because it needs parts of blocks that are cut otherwise. 'xc convert' with this mesh "
                "rewrites the checkpoint to fit"
            )
        else:
            notes.append(
                f"{times}, because most of what it needs is small, and each stored chunk has a header of its own. "
                "Another mesh or 'xc convert' would not change that"
            )
    refused = sum(one.change in ("missing", "other shape", "other type") for one in changes)
    if left:
        notes.append(
            f"the target does not name the part of {plural(len(left), 'key')}, which a load leaves out: {left[0]!r}, "
            "for one"
        )
    if refused:
        notes.append(
            f"a load with the default options would fail because of {plural(refused, 'key')}. docs/restoring.md has "
            "the options"
        )
    padded = [
        key
        for key, one in tensors.items()
        if any(n % tiles for n, tiles in zip(one.size, plan.tiles(key, tuple(one.size))))
    ]
    if padded:
        notes.append(
            f"the mesh does not cut {len(padded)} tensors evenly, so their shards are padded: {padded[0]!r}, for one"
        )
    if plan.rules and plan.devices > 1:
        whole = [key for key in tensors if plan.spec_of(key) is None]
        nbytes = sum(tensors[key].size.numel() * tensors[key].properties.dtype.itemsize for key in whole)
        if whole:
            notes.append(
                f"no --spec names {len(whole)} tensors ({format_bytes(nbytes)}), so every device gets all of them"
            )
    return notes


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"

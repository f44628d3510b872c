"""convert: rewrite a checkpoint with other chunks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_xla_ckpt import _dcp, api
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError
from torch_xla_ckpt.inspecting.meshes import MeshPlan
from torch_xla_ckpt.inspecting.opening import LIGHTNINGS_FILE, Checkpoint, names_of, open_checkpoint, open_path
from torch_xla_ckpt.inspecting.reading import Values
from torch_xla_ckpt.inspecting.step_names import step_name
from torch_xla_ckpt.inspecting.text import plural, shown
from torch_xla_ckpt.layout import Box, Shard, TensorLayout
from torch_xla_ckpt.manager import RunFolder
from torch_xla_ckpt.planner import CopyPlanner, paths_of
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.reports import format_bytes
from torch_xla_ckpt.serialization import METADATA, Encoded
from torch_xla_ckpt.storage import (
    Listing,
    Location,
    PathLike,
    ShardWriter,
    is_file,
    open_folder,
    require_undamaged,
    verify,
)

_TORCH_XLAS_FILE = ".manager_metadata"  # the file beside DCP's in steps of torch_xla's manager: step and time


@dataclass(frozen=True)
class Conversion:
    """A checkpoint that was rewritten.

    Args:
        source, target: the folders.
        tensors, objects: number of values of each kind.
        chunks_before, chunks_after: number of stored chunks.
        nbytes: bytes of all tensors.
        is_dry: whether nothing was written.
    """

    source: str
    target: str
    tensors: int
    objects: int
    chunks_before: int
    chunks_after: int
    nbytes: int
    is_dry: bool

    def __str__(self) -> str:
        did = "would rewrite" if self.is_dry else "rewrote"
        values = f"{plural(self.tensors, 'tensor')}, {plural(self.objects, 'object')}, {format_bytes(self.nbytes)}"
        lines = [
            f"{did} {shown(self.source)}",
            f"  as {shown(self.target)}",
            f"  {values}, {self.chunks_before:,} -> {plural(self.chunks_after, 'chunk')}",
        ]
        return "\n".join(lines if self.is_dry else [*lines, "  every tensor is complete, and every byte was read back"])


def convert(
    source: PathLike,
    target: PathLike,
    *,
    mesh: str | None = None,
    specs: Sequence[str] = (),
    overwrite: bool = False,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Conversion:
    """Rewrite a checkpoint, in any format that can be read, as a DCP checkpoint of this package with other chunks.

    Reads and writes chunk by chunk. Keys, paths, step, time, user metadata and the bytes of objects stay, and so does
    the ``meta.pt`` of Lightning. The target is committed in one step, after the proof that its chunks cover every
    tensor. Then all of it is read back.

    Files beside DCP's, such as ``meta.pt``, cannot be replaced in the same step as the checkpoint. So a checkpoint with
    such files is replaced only by itself, or by one with the same files.

    Args:
        source: the checkpoint, as for ``inspect``.
        target: the new checkpoint's folder. It may be the source's. With ``overwrite``, a name such as ``RUN/latest``
            means the folder of that step. Without, such a name is refused.
        mesh: the mesh whose shards become chunks, such as "fsdp=2,tensor=4". Default: tensors stay whole.
        specs: the axes that cut each key, such as "*.weight=fsdp,tensor".
        overwrite: whether a checkpoint at ``target`` may be replaced. Default False.
        dry_run: whether to write nothing. Default False.
        storage_options: options of the fsspec filesystem behind URLs, for both. Default: none.

    Raises:
        CheckpointError: there is no checkpoint; there is something at the target, or it names a step of a run; files
            beside the two checkpoints differ; or a spec does not fit.
        CorruptCheckpointError: bytes of the source, or those that were read back, are not what was written.
    """
    plan = MeshPlan.parse(mesh or "devices=1", specs)
    checkpoint = open_checkpoint(source, storage_options)
    location = _target(checkpoint, source, target, overwrite, storage_options)
    lightnings = _new_lightnings_file(checkpoint, location, is_replaced=_is_replaced(location, overwrite))
    values = Values(checkpoint)
    saved = values.metadata.state_dict_metadata
    tensors = {key: one for key, one in saved.items() if isinstance(one, TensorStorageMetadata)}
    if unused := plan.unused(list(tensors)):
        raise CheckpointError(f"no tensor matches {', '.join(map(repr, unused))}. 'xc ls PATH' lists the keys")
    access = _FromCheckpoint(values, plan)
    result = Conversion(
        source=checkpoint.location.url,
        target=location.url,
        tensors=len(tensors),
        objects=len(saved) - len(tensors),
        chunks_before=sum(len(one.chunks) for one in tensors.values()),
        chunks_after=sum(max(1, len(access.boxes(key, tuple(one.size)))) for key, one in tensors.items()),
        nbytes=sum(one.size.numel() * one.properties.dtype.itemsize for one in tensors.values()),
        is_dry=dry_run,
    )
    if not dry_run:
        _write(checkpoint, values, access, location, lightnings)
    return result


def _target(
    checkpoint: Checkpoint,
    source: PathLike,
    target: PathLike,
    overwrite: bool,
    storage_options: Mapping[str, Any] | None,
) -> Location:
    """Return the folder to write to.

    Raises:
        CheckpointError: the target names a step of a run, and may not be replaced.
    """
    location = Location.of(target, storage_options)
    asked = step_name(target, storage_options)
    if asked is None:
        return location
    # The newest step may be another one by now, and the source must not replace it.
    is_source = location.identity == Location.of(source, storage_options).identity
    found = checkpoint.location if is_source else asked.location()
    if not overwrite:
        raise CheckpointError(
            f"{location} means step {found.name} of the run, so no new folder can have that name. Nothing was written. "
            f"Choose another path, such as {asked.run.location}/NUMBER, or replace the step with --overwrite"
        )
    return found


def _is_replaced(location: Location, overwrite: bool) -> bool:
    """Return whether there is a checkpoint at the target, which may be replaced. False if the target is free.

    Raises:
        CheckpointError: something else is there.
    """
    if is_file(location):
        raise CheckpointError(f"{location} is a file, and convert writes a folder. Choose another path")
    try:
        found = open_path(location, ranks_own=True)
    except CheckpointError:
        return False
    if isinstance(found, RunFolder):
        raise CheckpointError(f"there is a run at {location}. Choose another path, such as {location}/NUMBER")
    if METADATA not in found.names:
        raise CheckpointError(
            f"convert does not replace what is at {location}: a model of another format, or checkpoints of single "
            "ranks. Choose another path"
        )
    if not overwrite:
        raise CheckpointError(
            f"there is a checkpoint at {location} already. Choose another path, or replace it with --overwrite"
        )
    return True


def _new_lightnings_file(checkpoint: Checkpoint, location: Location, *, is_replaced: bool) -> bytes | None:
    """Return the bytes of the ``meta.pt`` to write; None if there is nothing to write.

    Args:
        checkpoint: the source.
        location: the target.
        is_replaced: whether there is a checkpoint at the target.

    Raises:
        CheckpointError: the target has files beside its checkpoint that would not belong to the new one.
    """
    if location.identity == checkpoint.location.identity:
        return None
    folder = open_folder(location, sync=False)
    names = names_of(folder)
    new = checkpoint.folder.read(LIGHTNINGS_FILE) if LIGHTNINGS_FILE in checkpoint.names else None
    old = folder.read(LIGHTNINGS_FILE) if LIGHTNINGS_FILE in names else None
    if _TORCH_XLAS_FILE in names:
        other = _TORCH_XLAS_FILE
    elif new == old or (old is None and not is_replaced):
        return new if old is None else None
    else:
        other = LIGHTNINGS_FILE
    whose = location if other in names else checkpoint.location
    raise CheckpointError(
        f"convert does not write to {location}: the {other} of {whose} belongs to another checkpoint than the files "
        "beside it would then, and no storage replaces two files in one step. Nothing was written. Choose another path"
    )


def _write(
    checkpoint: Checkpoint, values: Values, access: _FromCheckpoint, location: Location, lightnings: bytes | None
) -> None:
    listing = checkpoint.listing()
    if listing.kind != "torch_xla_ckpt":
        require_undamaged(checkpoint.location)
    time = _time_of(listing)
    is_new = location.is_local and not os.path.lexists(location.path)
    writer = ShardWriter(location, step=listing.step, user_metadata=listing.user_metadata, time=time)
    planner = CopyPlanner(paths_of(values.metadata), lambda tensor: access)
    processes = Processes(None, alone=True)
    folder = open_folder(location)
    try:
        # Written before the commit: whenever this program ends, a committed checkpoint has its file.
        if lightnings is not None:
            folder.make()
            temporary = f"{METADATA}-{secrets.token_hex(8)}.tmp"  # a save removes it, if this program is killed
            folder.replace(LIGHTNINGS_FILE, [lightnings], temporary)
        with api.readable_errors(processes, f"writing to {location}", "converted"):
            _dcp.save(access.state(), writer, planner, None, True)
    except BaseException:
        writer.abandon()
        with suppress(OSError):
            if lightnings is not None and METADATA not in folder.names():
                folder.remove([LIGHTNINGS_FILE])
            if is_new:
                os.rmdir(location.path)
        raise
    report = verify(location)
    if not report.ok:
        raise CorruptCheckpointError(
            f"what was written to {location} could not be read back:\n{report}", report.damages
        )


def _time_of(listing: Listing) -> datetime | None:
    """Return when a checkpoint was saved; None if it does not tell."""
    try:
        time = datetime.fromisoformat(listing.time)
    except (ValueError, TypeError):
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=timezone.utc)


class _FromCheckpoint(TensorAccess):
    """Reads shards of placeholders from a checkpoint. Each box is a part of its own, so boxes are read one by one."""

    def __init__(self, values: Values, plan: MeshPlan):
        self._values = values
        self._plan = plan
        self._keys: dict[int, str] = {}
        self._placeholders: list[torch.Tensor] = []

    def state(self) -> dict[str, Any]:
        """Return a flat state dict: tensors without data, and the bytes of objects."""
        state: dict[str, Any] = {}
        for key, saved in self._values.metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                placeholder = torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
                placeholder.requires_grad_(saved.properties.requires_grad)
                self._keys[id(placeholder)] = key
                self._placeholders.append(placeholder)
                state[key] = placeholder
            else:
                state[key] = Encoded(self._values.object_bytes(key), lambda: None)
        return state

    def boxes(self, key: str, shape: tuple[int, ...]) -> list[Box]:
        """Return the distinct boxes of a tensor, without empty ones."""
        return [box for box in dict.fromkeys(self._plan.boxes(key, shape)) if box.volume]

    def settle(self) -> None:
        pass

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        key, shape = self._keys[id(tensor)], tuple(tensor.shape)
        shards = tuple(Shard(box, "file", part) for part, box in enumerate(self.boxes(key, shape)))
        shard_shape = self._plan.shard_shape(key, shape)
        return TensorLayout(shape, tensor.dtype, shards, shard_shape, self._plan.describe(key, shape), identical=True)

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        box = layout.shards[part].box
        return {box: self._values.tensor(self._keys[id(tensor)], box)}

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        return layout.shards[part].box.volume * tensor.itemsize

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        raise NotImplementedError("placeholders are only read")

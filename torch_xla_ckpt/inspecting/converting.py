"""convert: rewrite a checkpoint with other chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_xla_ckpt import _dcp, api
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError
from torch_xla_ckpt.inspecting.meshes import MeshPlan
from torch_xla_ckpt.inspecting.opening import LIGHTNINGS_FILE, Checkpoint, open_checkpoint, open_path
from torch_xla_ckpt.inspecting.reading import Values
from torch_xla_ckpt.inspecting.text import plural, shown
from torch_xla_ckpt.layout import Box, Shard, TensorLayout
from torch_xla_ckpt.manager import RunFolder
from torch_xla_ckpt.planner import CopyPlanner, paths_of
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.reports import format_bytes
from torch_xla_ckpt.serialization import METADATA, Encoded
from torch_xla_ckpt.storage import Location, PathLike, ShardWriter, is_file, open_folder, require_undamaged, verify


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

    Reads and writes chunk by chunk. Keys, paths, step, user metadata and the bytes of objects stay, and so does the
    ``meta.pt`` of Lightning. The target is committed in one step, after the proof that its chunks cover every tensor.
    Then all of it is read back.

    Args:
        source: the checkpoint, as for ``inspect``.
        target: the new checkpoint's folder. It may be the source's.
        mesh: the mesh whose shards become chunks, such as "fsdp=2,tensor=4". Default: tensors stay whole.
        specs: the axes that cut each key, such as "*.weight=fsdp,tensor".
        overwrite: whether a checkpoint at ``target`` may be replaced. Default False.
        dry_run: whether to write nothing. Default False.
        storage_options: options of the fsspec filesystem behind URLs, for both. Default: none.

    Raises:
        CheckpointError: there is no checkpoint; there is something at the target; or a spec does not fit.
        CorruptCheckpointError: bytes of the source, or those that were read back, are not what was written.
    """
    plan = MeshPlan.parse(mesh or "devices=1", specs)
    checkpoint = open_checkpoint(source, storage_options)
    location = Location.of(target, storage_options)
    _require_free(location, overwrite)
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
        if checkpoint.listing().kind != "torch_xla_ckpt":
            require_undamaged(checkpoint.location)
        _write(checkpoint, values, access, location)
    return result


def _require_free(location: Location, overwrite: bool) -> None:
    """Check that the target is free, or holds a checkpoint that may be replaced.

    Raises:
        CheckpointError: something else is there.
    """
    if is_file(location):
        raise CheckpointError(f"{location} is a file, and convert writes a folder. Choose another path")
    try:
        found = open_path(location, ranks_own=True)
    except CheckpointError:
        return
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


def _write(checkpoint: Checkpoint, values: Values, access: _FromCheckpoint, location: Location) -> None:
    listing = checkpoint.listing()
    writer = ShardWriter(location, step=listing.step, user_metadata=listing.user_metadata)
    planner = CopyPlanner(paths_of(values.metadata), lambda tensor: access)
    processes = Processes(None, alone=True)
    lightnings = checkpoint.folder.read(LIGHTNINGS_FILE) if LIGHTNINGS_FILE in checkpoint.names else None
    try:
        with api.readable_errors(processes, f"writing to {location}", "converted"):
            _dcp.save(access.state(), writer, planner, None, True)
    except BaseException:
        writer.abandon()
        raise
    if lightnings is not None:
        folder = open_folder(location)
        folder.replace(LIGHTNINGS_FILE, [lightnings], f".{LIGHTNINGS_FILE}.tmp")
    report = verify(location)
    if not report.ok:
        raise CorruptCheckpointError(
            f"what was written to {location} could not be read back:\n{report}", report.damages
        )


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

"""Tensors on XLA devices. The only module that imports torch_xla, and the only one that uses its private names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

try:
    import torch_xla
except ImportError as error:
    raise ImportError(
        "this needs torch_xla, because it handles tensors on XLA devices. Install the pair that fits together: "
        "pip install 'torch_xla_ckpt[xla]'"
    ) from error
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla import _XLAC
from torch_xla.distributed.spmd import XLAShardedTensor

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box, Shard, TensorLayout

_TILES = re.compile(r"devices=\[([\d,]+)\]")


class XlaAccess:
    """``TensorAccess`` for XLA tensors, sharded by SPMD or not."""

    def settle(self) -> None:
        with same_seed():  # every sync moves it on
            torch_xla.sync()
        xm.wait_device_ops()

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        """The live tensor's layout: what the compiler made of it, not what the program marked."""
        tensor = _unwrapped(tensor)
        spec = _XLAC._get_xla_sharding_spec(tensor)
        devices = self.devices()
        if _tiled(spec):
            ((*pieces,),) = _XLAC._get_local_shard_replica_and_indices([tensor])
            places = zip(devices, pieces, strict=True)
            shards = tuple(Shard(_box(index, tensor.shape), device, n) for device, (n, index) in places)
            shard_shape = tuple(-(-n // tiles) for n, tiles in zip(tensor.shape, _tiles(spec)))
        else:
            whole = Box.whole(tensor.shape)
            shards = tuple(Shard(whole, device, n) for n, device in enumerate(devices))
            shard_shape = whole.sizes
        return TensorLayout(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            shards=shards,
            shard_shape=shard_shape,
            sharding=spec or "unmarked",
            # Without SPMD every process computes on its own, and replicas are only meant to agree.
            identical=xr.is_spmd(),
        )

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout) -> Mapping[Box, torch.Tensor]:
        tensor = _unwrapped(tensor)
        if layout.dtype == torch.complex128:
            return self._fetch_complex128(tensor, layout)
        if not _tiled(_XLAC._get_xla_sharding_spec(tensor)):
            (full,) = _XLAC._xla_get_cpu_tensors([tensor])
            return {layout.shards[0].box: full}
        (pieces,) = _XLAC._get_local_shards([tensor])
        # Shards of unsigned tensors come back as the signed type of the same size: the bits are right.
        data = {device: piece.view(layout.dtype) for piece, device in pieces}
        boxes = {shard.box: data[shard.device] for shard in reversed(layout.shards)}
        return {box: piece[tuple(slice(n) for n in box.sizes)] for box, piece in boxes.items()}

    def _fetch_complex128(self, tensor: torch.Tensor, layout: TensorLayout) -> Mapping[Box, torch.Tensor]:
        """The runtime drops the imaginary part of complex128 on the way to the host: fetch the two parts apart."""
        parts = [tensor.real.clone(), tensor.imag.clone()]
        if _tiled(_XLAC._get_xla_sharding_spec(tensor)):
            for part in parts:
                _XLAC._xla_mark_sharding(part, _XLAC._get_xla_op_sharding(tensor))
        self.settle()
        real, imag = (self.fetch(part, replace(layout, dtype=torch.float64)) for part in parts)
        return {box: torch.complex(real[box], imag[box]) for box in real}

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        tensor = _unwrapped(tensor)
        if not _tiled(_XLAC._get_xla_sharding_spec(tensor)):
            data = shards[layout.shards[0].box]
            if data.ndim == 0:
                # Copied from the host, a 0-d tensor becomes a constant of the graph, and there are no float8 ones.
                (data,) = _XLAC._xla_tensors_from_aten([data], [str(tensor.device)], [None])
            with torch.no_grad():
                tensor.detach().copy_(data)
            return
        if tensor._is_view():
            # New shards for a view would leave its base behind: give them to a tensor of its own, and copy that.
            fresh = torch.zeros_like(tensor)
            _XLAC._xla_mark_sharding(fresh, _XLAC._get_xla_op_sharding(tensor))
            self.settle()
            self.put(fresh, layout, shards)
            with torch.no_grad():
                tensor.copy_(fresh)
            return
        # A device whose shard is all padding still wants a tensor to hold.
        hollow = {shard.box for shard in layout.shards if not shard.box.volume}
        padding = {box: torch.zeros(layout.shard_shape, dtype=layout.dtype) for box in hollow}
        parts = [padding[shard.box] if shard.box in hollow else shards[shard.box] for shard in layout.shards]
        _XLAC._load_local_shards(tensor, parts, [shard.device for shard in layout.shards])

    def devices(self) -> list[str]:
        """Names of this process's devices, in the order in which the runtime lists shards."""
        return _XLAC._xla_get_runtime_devices()


@contextmanager
def same_seed() -> Iterator[None]:
    """Put the devices' seed back: training must draw the numbers it would have drawn without a checkpoint."""
    seed = xm.get_rng_state()
    try:
        yield
    finally:
        xm.set_rng_state(seed)


def make(shape: torch.Size, dtype: torch.dtype, op_sharding: Any) -> torch.Tensor:
    """A new tensor of zeros, sharded; nothing is computed before the next sync, and then each device's shard only."""
    tensor = torch.zeros(shape, dtype=dtype, device="xla")
    if op_sharding is not None:
        _XLAC._xla_mark_sharding(tensor, op_sharding)
    return tensor


def op_sharding(mesh: Any, spec: Sequence[Any], shape: torch.Size) -> Any:
    """The runtime's sharding for a partition spec.

    Raises:
        ValueError: it does not fit the mesh or the shape.
    """
    require_spec(mesh, spec, shape)
    if not shape.numel() or all(axis is None for axis in spec):
        return None
    return mesh.get_op_sharding(tuple(spec))


def require_spec(mesh: Any, spec: Sequence[Any], shape: Sequence[int]) -> None:
    """Show that a partition spec fits a mesh and a tensor.

    Raises:
        ValueError: it does not.
    """
    names = mesh.axis_names or ()
    if len(spec) != len(shape):
        raise ValueError(f"the partition spec {tuple(spec)} has {len(spec)} entries for {len(shape)} dimensions")
    axes = [axis for entry in spec if entry is not None for axis in (entry if isinstance(entry, tuple) else (entry,))]
    for axis in axes:
        known = axis in names if isinstance(axis, str) else 0 <= axis < len(mesh.mesh_shape)
        if not known:
            raise ValueError(f"the mesh has no axis {axis!r}; it has {names or len(mesh.mesh_shape)}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"the partition spec {tuple(spec)} uses an axis of the mesh twice")


def mark(tensor: torch.Tensor, mesh: Any, spec: Sequence[Any]) -> None:
    """Shard a tensor on devices that is whole on each of them."""
    sharding = op_sharding(mesh, spec, tensor.shape)
    if sharding is not None:
        forget_replication(tensor)
        _XLAC._xla_mark_sharding(tensor, sharding)


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether the devices hold different parts of a tensor."""
    return tensor.device.type == "xla" and _tiled(_XLAC._get_xla_sharding_spec(_unwrapped(tensor)))


def forget_replication(tensor: torch.Tensor) -> None:
    """Let a tensor that the compiler has replicated be marked."""
    if _XLAC._get_xla_sharding_spec(tensor):
        _XLAC._xla_clear_sharding(tensor)


def op_sharding_of(tensor: torch.Tensor) -> Any:
    """The runtime's sharding of a tensor, if it is cut."""
    tensor = _unwrapped(tensor)
    return _XLAC._get_xla_op_sharding(tensor) if _tiled(_XLAC._get_xla_sharding_spec(tensor)) else None


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.global_tensor if isinstance(tensor, XLAShardedTensor) else tensor


def _tiled(spec: str) -> bool:
    """Whether the runtime keeps shards apart; "" (never marked) and "{replicated}" are whole on every device."""
    if not spec or spec == "{replicated}":
        return False
    if _TILES.search(spec) and "manual" not in spec:
        return True
    raise CheckpointError(f"a tensor with the sharding {spec} has no boxes to save. Give it a tiled or replicated one")


def _tiles(spec: str) -> list[int]:
    """Number of tiles in each dimension; further numbers count replicas."""
    match = _TILES.search(spec)
    assert match is not None, spec
    return [int(n) for n in match[1].split(",")]


def _box(index: Any, shape: torch.Size) -> Box:
    """The box of a shard from the runtime's slices; an Ellipsis stands for the whole tensor."""
    if index is Ellipsis:
        return Box.whole(shape)
    return Box(tuple(part.start for part in index), tuple(part.stop - part.start for part in index))

"""``TensorAccess`` for XLA tensors, and what torch knows about their memory: views and aliases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch_xla.runtime as xr
from torch_xla import _XLAC
from torch_xla.distributed.spmd import XLAShardedTensor

from torch_xla_ckpt.device.host import data_changed
from torch_xla_ckpt.device.xla.runtime import await_devices, compute_pending
from torch_xla_ckpt.device.xla.sharding import apply, global_tensor, is_tiled, op_sharding_of, spec_of, tiles_of
from torch_xla_ckpt.layout import Box, Shard, TensorLayout, elements_overlap
from torch_xla_ckpt.protocols import TensorAccess

# Operations that make a view in which one element can appear several times.
_REPEATING = tuple(
    getattr(torch._C._functionalization, f"{name}_ViewMeta") for name in ("expand", "unfold", "as_strided")
)


class XlaAccess(TensorAccess):
    """``TensorAccess`` for XLA tensors, sharded by SPMD or not."""

    def settle(self) -> None:
        compute_pending()
        await_devices()

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        """Return the live tensor's layout. The compiler may have sharded a tensor that the program did not mark."""
        tensor = global_tensor(tensor)
        spec = spec_of(tensor)
        devices = self.devices()
        if is_tiled(spec):
            ((*replicas_and_slices,),) = _XLAC._get_local_shard_replica_and_indices([tensor])
            slices = [index for _, index in replicas_and_slices]
            shards = tuple(Shard(_box(index, tensor.shape), dev) for dev, index in zip(devices, slices, strict=True))
            shard_shape = tuple(-(-n // tiles) for n, tiles in zip(tensor.shape, tiles_of(spec, tensor.ndim)))
        else:
            whole = Box.whole(tensor.shape)
            shards = tuple(Shard(whole, device) for device in devices)
            shard_shape = whole.sizes
        return TensorLayout(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            shards=shards,
            shard_shape=shard_shape,
            sharding=spec or "unmarked",
            # Without SPMD every process computes separately, and replicas may differ.
            identical=xr.is_spmd(),
        )

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        tensor = global_tensor(tensor)
        if layout.dtype == torch.complex128:
            return self._fetch_complex128(tensor, layout)
        if not is_tiled(spec_of(tensor)):
            (full,) = _XLAC._xla_get_cpu_tensors([tensor])
            return {layout.shards[0].box: full}
        (shards,) = _XLAC._get_local_shards([tensor])
        # Shards of unsigned tensors come back with the signed dtype of the same size. Their bits are right.
        data = {device: shard.view(layout.dtype) for shard, device in shards}
        boxes = {shard.box: data[shard.device] for shard in reversed(layout.shards)}
        return {box: shard[tuple(slice(n) for n in box.sizes)] for box, shard in boxes.items()}

    def _fetch_complex128(self, tensor: torch.Tensor, layout: TensorLayout) -> Mapping[Box, torch.Tensor]:
        """Fetch real and imaginary parts separately: the runtime drops the imaginary part of complex128."""
        components = [tensor.real.clone(), tensor.imag.clone()]
        for component in components:
            apply(component, op_sharding_of(tensor))
        self.settle()
        real, imag = (self.fetch(component, replace(layout, dtype=torch.float64)) for component in components)
        return {box: torch.complex(real[box], imag[box]) for box in real}

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        return layout.nbytes

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        if isinstance(tensor, XLAShardedTensor):
            data_changed(tensor)
        tensor = global_tensor(tensor)
        if not is_tiled(spec_of(tensor)):
            self._put_whole(tensor, shards[layout.shards[0].box])
        elif tensor._is_view():
            self._put_view(tensor, layout, shards)
        else:
            self._put_shards(tensor, layout, shards)

    def _put_whole(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        if data.ndim == 0:
            # Copied from the host, a 0-d tensor becomes a constant of the graph, and XLA has no float8 constants.
            (data,) = _XLAC._xla_tensors_from_aten([data], [str(tensor.device)], [None])
        with torch.no_grad():
            tensor.detach().copy_(data)

    def _put_view(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        """Put shards into a new tensor, and copy that: new shards of a view would not reach the view's base."""
        fresh = torch.zeros_like(tensor)
        apply(fresh, op_sharding_of(tensor))
        self.settle()
        self.put(fresh, layout, shards)
        with torch.no_grad():
            tensor.copy_(fresh)

    def _put_shards(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        # A device whose shard is all padding needs a tensor too.
        hollow = {shard.box for shard in layout.shards if not shard.box.volume}
        padding = {box: torch.zeros(layout.shard_shape, dtype=layout.dtype) for box in hollow}
        data = [padding[shard.box] if shard.box in hollow else shards[shard.box] for shard in layout.shards]
        _XLAC._load_local_shards(tensor, data, [shard.device for shard in layout.shards])
        if torch._is_functional_tensor(tensor):
            torch._functionalize_commit_update(tensor)  # views recompute from the new data when they are used next
        data_changed(tensor)

    def devices(self) -> list[str]:
        """Names of this process's devices, in the order in which the runtime lists shards."""
        return _XLAC._xla_get_runtime_devices()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements of a view are one element of the tensor that it views.

    Every XLA tensor has the strides of a contiguous one, whatever it views. So the view is replayed on an ordinary
    tensor, whose strides tell. If the base is not known, views that can repeat elements (``expand``, ``unfold``,
    ``as_strided``) count as overlapping.
    """
    tensor = global_tensor(tensor)
    if not torch._is_functional_tensor(tensor) or tensor.numel() < 2:
        return False
    steps = torch._C._functionalization.get_view_meta_sequence(tensor)
    if not any(isinstance(step, _REPEATING) for step in steps):
        return False
    base = tensor._base if tensor._is_view() else None
    if base is None:
        return True
    replayed = tensor._view_func_unsafe(torch.empty(base.shape, dtype=base.dtype, device="meta"))
    return elements_overlap(tuple(replayed.shape), replayed.stride())


def alias_of(tensor: torch.Tensor) -> tuple[str, int]:
    """Return an identity that a tensor shares with its ``detach()`` and ``data``, but not with its views."""
    return "xla", _XLAC._xla_get_tensor_id(global_tensor(tensor))


def _box(index: Any, shape: torch.Size) -> Box:
    """Return the box of a shard from the runtime's slices. An Ellipsis stands for the whole tensor."""
    if index is Ellipsis:
        return Box.whole(shape)
    return Box(tuple(part.start for part in index), tuple(part.stop - part.start for part in index))

"""Tensors that plain torch can read: in host memory, on any device with a copy, and the local part of a DTensor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch.distributed.tensor import DTensor

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box, Shard, TensorLayout


class HostAccess:
    """``TensorAccess`` through ordinary torch operations."""

    def settle(self) -> None:
        pass

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        if _dcp.is_sharded_tensor(tensor):
            raise CheckpointError("a ShardedTensor cannot be saved or loaded. Use DTensor, which replaces it in torch")
        if tensor.device.type == "meta":
            raise CheckpointError("a tensor on the meta device has no data. Give it a device first (module.to_empty)")
        if tensor.layout != torch.strided:
            raise CheckpointError(
                "a sparse tensor cannot be saved or loaded. Use its indices and values, or tensor.to_dense()"
            )
        if not isinstance(tensor, DTensor):
            return _whole(tuple(tensor.shape), tensor.dtype, str(tensor.device))
        box = _dcp.dtensor_box(tensor)
        return TensorLayout(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            shards=(Shard(box, str(tensor.device), 0),) if box is not None else (),
            shard_shape=box.sizes if box is not None else tuple(tensor.shape),
            sharding=str(tuple(tensor.placements)),
            identical=not any(placement.is_partial() for placement in tensor.placements),
        )

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        if not layout.shards:
            return {}
        data = _local(tensor).detach()
        if data.device.type != "cpu":
            data = data.cpu()
        if data.is_conj() or data.is_neg():  # only flags beside the other data, until torch computes it
            data = data.resolve_conj().resolve_neg()
        return {layout.shards[0].box: data}

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        return 0 if tensor.device.type == "cpu" else layout.nbytes

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        local = _local(tensor).detach()
        return local if local.device.type == "cpu" and local.is_contiguous() else None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        with torch.no_grad():
            _local(tensor).detach().copy_(shards[layout.shards[0].box])


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> TensorLayout:
    """The layout of an ordinary tensor; programs have thousands of small ones of few shapes."""
    box = Box.whole(shape)
    return TensorLayout(shape, dtype, (Shard(box, device, 0),), box.sizes, sharding="host", identical=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

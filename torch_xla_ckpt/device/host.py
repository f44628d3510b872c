"""Tensors that plain torch can read: in host memory, on any device with a copy, and the local part of a DTensor."""

from __future__ import annotations

from collections.abc import Mapping

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
        if isinstance(tensor, DTensor):
            box = _dcp.dtensor_box(tensor)
            sharding = str(tuple(tensor.placements))
        else:
            box, sharding = Box.whole(tensor.shape), "host"
        return TensorLayout(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            shards=(Shard(box, str(tensor.device), 0),) if box is not None else (),
            shard_shape=box.sizes if box is not None else tuple(tensor.shape),
            sharding=sharding,
            identical=isinstance(tensor, DTensor) and not any(p.is_partial() for p in tensor.placements),
        )

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout) -> Mapping[Box, torch.Tensor]:
        if not layout.shards:
            return {}
        # A conjugate or negative that torch has not computed yet is only a flag beside the other data.
        data = _local(tensor).detach().cpu().resolve_conj().resolve_neg()
        return {layout.shards[0].box: data}

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        with torch.no_grad():
            _local(tensor).detach().copy_(shards[layout.shards[0].box])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

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
            identical=isinstance(tensor, DTensor),
        )

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout) -> Mapping[Box, torch.Tensor]:
        if not layout.shards:
            return {}
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta":
            raise CheckpointError(
                "a tensor on the meta device has no data to save. Materialise it first, or leave it out"
            )
        return {layout.shards[0].box: local.detach().cpu()}

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta":
            raise CheckpointError(
                "a tensor on the meta device cannot be loaded in place. Give it a device first (module.to_empty)"
            )
        with torch.no_grad():
            local.detach().copy_(shards[layout.shards[0].box])

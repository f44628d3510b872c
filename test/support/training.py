"""A small program that trains on all eight devices, with buffers donated from step to step."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC
from torch_xla.debug import metrics

from support.meshes import mesh


class Training:
    """Two sharded layers with biases that nobody marked, under AdamW; what is not a tensor changes too."""

    def __init__(self, shape=(4, 2), width=64):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 8))
        self.model.to("xla")
        on = mesh(shape)
        xs.mark_sharding(self.model[0].weight, on, ("a", "b"))
        xs.mark_sharding(self.model[2].weight, on, (None, "a"))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.inputs = torch.randn(8, width).to("xla")
        xs.mark_sharding(self.inputs, on, ("a", None))
        self.seen = []
        self.average = torch.zeros(3)  # in host memory

    def step(self):
        loss = self.model(self.inputs).square().mean()
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        torch_xla.sync()
        self.seen.append(len(self.seen))
        self.average.mul_(0.5).add_(len(self.seen))

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optim": self.optim.state_dict(),
            "seen": self.seen,
            "average": self.average,
        }


def compiled():
    """How many graphs have been compiled."""
    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


def on_host(state):
    """What a state holds now, key by key, read without this package."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    from support.meshes import settle

    settle()
    found = {}
    for key, value in flatten_state_dict(state)[0].items():
        if isinstance(value, torch.Tensor):
            found[key] = assembled(value) if value.device.type == "xla" else value.clone()
        else:
            found[key] = list(value) if isinstance(value, list) else value
    return found


def assembled(tensor):
    """The whole of a sharded tensor, from what torch_xla's own wrapper says of its shards.

    Waits for the devices: the wrapper fails while a step that computes the tensor still runs.
    """
    xm.wait_device_ops()
    sharded = xs.wrap_if_sharded(tensor.detach())
    if not isinstance(sharded, xs.XLAShardedTensor) or sharded.sharding_type == xs.ShardingType.REPLICATED:
        return _XLAC._xla_get_cpu_tensors([tensor.detach()])[0].clone()
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for shard in sharded.local_shards:
        whole[tuple(shard.indices) if shard.indices is not Ellipsis else ...] = shard.unpadded_data
    return whole

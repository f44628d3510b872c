"""Host tensors that are cut over the devices of simulated ranks, so that no device is needed."""

import pickle

import torch_xla_ckpt as xc
from torch_xla_ckpt.device import access_of
from torch_xla_ckpt.layout import Box, Shard, TensorLayout


class CutAccess:
    """Access to host tensors of which a rank holds some boxes.

    ``boxes`` returns the boxes of a tensor; None for a tensor that is not cut.
    """

    def __init__(self, boxes, sharding="cut", identical=True):
        self.boxes = boxes
        self.sharding = sharding
        self.identical = identical

    def settle(self):
        pass

    def layout(self, tensor):
        boxes = self.boxes(tensor)
        shards = tuple(Shard(box, f"device {n}") for n, box in enumerate(boxes))
        most = tuple(max((box.sizes[dim] for box in boxes), default=0) for dim in range(tensor.ndim))
        return TensorLayout(tuple(tensor.shape), tensor.dtype, shards, most, self.sharding, self.identical)

    def fetch(self, tensor, layout, part=0):
        return {box: tensor.detach()[box.slices].clone() for box in layout.boxes}

    def host_bytes(self, tensor, layout, part=0):
        return layout.nbytes

    def memory(self, tensor):
        return None

    def put(self, tensor, layout, shards):
        for box in layout.boxes:
            tensor.detach()[box.slices] = shards[box][tuple(slice(n) for n in box.sizes)]

    def __call__(self, tensor):
        return access_of(tensor) if self.boxes(tensor) is None else self


def grid(rows, columns, rank=0, world=1):
    """A function that returns a rank's share of the boxes of a matrix that is cut into a grid."""

    def boxes(tensor):
        if tensor.ndim != 2:
            return None
        height, width = max(1, -(-tensor.shape[0] // rows)), max(1, -(-tensor.shape[1] // columns))
        every = [
            Box((a, b), (min(height, tensor.shape[0] - a), min(width, tensor.shape[1] - b)))
            for a in range(0, tensor.shape[0], height)
            for b in range(0, tensor.shape[1], width)
        ]
        return every[rank::world]

    return boxes


def sent_plan(state, access):
    """The local plan of a rank, as it arrives at the coordinator."""
    planner = xc.SPMDSavePlanner(access=access)
    planner.set_up_planner(state)
    return pickle.loads(pickle.dumps(planner.create_local_plan()))


def planned(plans):
    """What the coordinator makes of the ranks' plans: the metadata, and each rank's boxes by key."""
    found, metadata = xc.SPMDSavePlanner().create_global_plan(plans)
    boxes = []
    for plan in found:
        own = {}
        for item in plan.items:
            chunk = item.tensor_data and (tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
            own.setdefault(item.index.fqn, []).append(chunk)
        boxes.append(own)
    return metadata, boxes

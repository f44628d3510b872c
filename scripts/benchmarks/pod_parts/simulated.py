"""A simulated pod: hosts with chips, tensors cut over the chips, and what each host sends in a save.

No device and no data is needed to plan. A tensor of the state lies on the meta device, and a ``TensorAccess`` tells the
boxes that a host's chips would hold.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Box, Shard, TensorLayout
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.storage.stored import BLOCK
from torch_xla_ckpt.storage.written import WrittenItems

_FRAME = 1088  # bytes that torch.save writes around a tensor


@dataclass(frozen=True)
class Pod:
    """A pod and the state that it trains.

    Args:
        hosts: number of hosts.
        chips: chips of each host.
        tensors: number of tensors.
        replicas: number of data-parallel replicas, each of which holds the whole state.
    """

    hosts: int
    chips: int = 4
    tensors: int = 1000
    replicas: int = 1

    @property
    def cuts(self) -> int:
        """The boxes that each tensor is cut into."""
        return self.hosts * self.chips // self.replicas

    @property
    def chunks(self) -> int:
        """The distinct boxes of all tensors."""
        return self.cuts * self.tensors

    @property
    def distinct_hosts(self) -> int:
        """The hosts that hold different boxes. Other hosts hold replicas of theirs."""
        return self.hosts // self.replicas

    def grid(self, number: int) -> tuple[int, int]:
        """Return the number of cuts of a tensor in each dimension: rows, columns and grids alternate."""
        rows = 2 ** (math.frexp(math.sqrt(self.cuts))[1] - 1)
        return ((self.cuts, 1), (1, self.cuts), (rows, self.cuts // rows))[number % 3]

    def shape(self, number: int) -> tuple[int, int]:
        """Return the shape of a tensor. There are twelve shapes, as in a model of a few kinds of layers."""
        side = max(4096, self.cuts)
        return (side * (1 + number % 4), side)

    def state(self) -> dict[str, dict[str, torch.Tensor | int]]:
        """Return the state of a host: tensors under "model", and an object."""
        names = (f"layers.{number // 10}.block{number % 10}.weight" for number in range(self.tensors))
        model = {name: torch.empty(self.shape(n), device="meta") for n, name in enumerate(names)}
        return {"model": {**model}, "progress": {"step": 100}}

    def access(self, host: int, state: Mapping[str, Mapping[str, torch.Tensor | int]]) -> Callable[..., TensorAccess]:
        """Return the function that a host's planner gets as ``access=``."""
        numbers = {id(tensor): number for number, tensor in enumerate(state["model"].values())}
        access = PodAccess(self, host, numbers)
        return lambda tensor: access


class PodAccess(TensorAccess):
    """Tells the boxes that the chips of one host hold.

    Args:
        pod: the pod.
        host: the host's number.
        numbers: the number of each tensor, by the tensor's id.
    """

    def __init__(self, pod: Pod, host: int, numbers: Mapping[int, int]):
        self._pod = pod
        self._numbers = numbers
        first = host * pod.chips
        self._places = [chip % pod.cuts for chip in range(first, first + pod.chips)]
        self._known: dict[tuple[tuple[int, int], tuple[int, int]], TensorLayout] = {}

    def settle(self) -> None:
        pass

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        number = self._numbers[id(tensor)]
        shape, grid = self._pod.shape(number), self._pod.grid(number)
        known = self._known.get((shape, grid))
        if known is None:
            rows, columns = shape[0] // grid[0], shape[1] // grid[1]
            boxes = [
                Box((place // grid[1] * rows, place % grid[1] * columns), (rows, columns)) for place in self._places
            ]
            shards = tuple(Shard(box, f"TPU:{place}") for place, box in zip(self._places, boxes))
            sharding = f"{{devices=[{grid[0]},{grid[1]}]{','.join(map(str, range(self._pod.cuts)))}}}"
            known = TensorLayout(shape, torch.float32, shards, (rows, columns), sharding, identical=True)
            self._known[shape, grid] = known
        return known

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        return layout.nbytes

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        raise NotImplementedError("a simulated pod has no data")

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        raise NotImplementedError("a simulated pod has no data")


def next_plan(sent: bytes, got: bytes) -> bytes:
    """Return the plan that a host sends in the next save: the same one, and a digest of the items that it has got.

    Args:
        sent: the plan that the host has sent, pickled.
        got: the plan that it has got, pickled.
    """
    plan = pickle.loads(sent)
    facts = replace(plan.planner_data, held=pickle.loads(got).items.digest)
    return pickle.dumps(replace(plan, planner_data=facts))


def written(items: _dcp.Items, host: int, save_id: str, seed: int) -> WrittenItems:
    """Return what a host sends after it has written its items, in a random order and with random checksums."""
    generator = np.random.default_rng([seed, host])
    ndim = items.boxes.shape[1] // 2
    is_tensor = np.array([entry.dtype is not None for entry in items.entries])[items.numbers]
    length = np.where(is_tensor, _FRAME + 4 * items.boxes[:, ndim:].prod(axis=1), 1024)
    extent = (length + 63) // 64 * 64
    order = generator.permutation(len(items))
    offset = np.empty(len(items), dtype=np.int64)
    offset[order] = np.cumsum(extent[order]) - extent[order]
    blocks = int(np.maximum(1, -(-extent // BLOCK)).sum())
    return WrittenItems.of_columns(
        names=(f"__{host}_0-{save_id}.distcp",),
        numbers=np.arange(len(items)),
        file=np.zeros(len(items), dtype=np.int64),
        offset=offset,
        length=length,
        data=np.where(is_tensor, _FRAME, -1),
        checksums=generator.bytes(8 * blocks),
    )

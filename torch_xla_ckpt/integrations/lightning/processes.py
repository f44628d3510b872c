"""What Lightning asks a strategy about processes: under SPMD, all of them run one program on all data."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.device import lazy


class OneProgram(Strategy):
    """A strategy for processes that run one program, each on its share of the devices."""

    @property
    def root_device(self) -> torch.device:
        """The device that stands for all devices."""
        return lazy.xla.root_device()

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return Processes(None).rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its host: 0, because one process drives all devices of a host."""
        return 0

    @property
    def node_rank(self) -> int:
        """The rank of this process's host."""
        return self.global_rank

    @property
    def world_size(self) -> int:
        """1: all processes run one program on all data, and SPMD cuts the batches."""
        return 1

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process."""
        return self.global_rank == 0

    # Values of all processes. SPMD computes with whole tensors, so there is nothing to reduce or to gather.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the tensor, which has been computed from the whole batch."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensor, which is whole."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        Processes(None).gather(None, f"waiting at {name}")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of the process ``src`` on all processes."""
        return Processes(None).gather(obj, "broadcasting an object")[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes say yes, or any of them."""
        answers = Processes(None).gather(bool(decision), "agreeing on a decision")
        return False not in answers if all else True in answers

    def setup_environment(self) -> None:
        """Seed the devices with what ``seed_everything`` was given, as it seeds all other generators."""
        super().setup_environment()
        seed = os.environ.get("PL_GLOBAL_SEED")
        if seed is not None:
            lazy.xla.set_seed(int(seed))

"""The random generators of a process, as part of a checkpoint."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torch_xla_ckpt.device import lazy
from torch_xla_ckpt.state import RankState

RNG_KEY = "rng_of_processes"
"""The top-level key under which a manager saves the random generators."""


class Generators:
    """A ``Stateful`` of this process's random generators: torch, numpy, Python, and the seed of the XLA devices.

    If the number of ranks has changed, a rank without generators in the checkpoint keeps its own, with a warning.

    Args:
        rank: the rank of the process. Every rank saves its own generators.
        empty: True for restoring: ``state_dict`` is empty then, and takes what the checkpoint has.
    """

    def __init__(self, rank: int, empty: bool = False):
        self._rank = rank
        self._empty = empty

    def state_dict(self) -> dict[str, Any]:
        several = dist.is_available() and dist.is_initialized()
        ranks = dist.get_world_size() if several else 1
        return RankState({} if self._empty else _state(), self._rank, max(ranks, self._rank + 1), resize="warn")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = state.get(f"rank{self._rank}")
        if not own:
            return  # the load has warned about it
        torch.set_rng_state(own["torch"])
        np.random.set_state(own["numpy"])
        random.setstate(own["python"])
        if "xla" in own and "torch_xla" in sys.modules:
            lazy.xla.set_seed(own["xla"])


def _state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if "torch_xla" in sys.modules:
        state["xla"] = lazy.xla.seed()
    return state

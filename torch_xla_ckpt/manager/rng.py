"""The random generators of a process, as part of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torch_xla_ckpt.state import RankState, random_state, set_random_state

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
        return RankState({} if self._empty else random_state(), self._rank, max(ranks, self._rank + 1), resize="warn")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = state.get(f"rank{self._rank}")
        if not own:
            return  # the load has warned about it
        set_random_state(own)

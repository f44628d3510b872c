"""The random generators of a process, as part of a checkpoint."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


class Generators:
    """A ``Stateful`` of this process's generators: torch, numpy, python, and the seed of the XLA devices.

    Args:
        rank: of the process; every one has a state of its own.
        empty: to be restored into: asks for nothing, and takes what there is.
    """

    def __init__(self, rank: int, empty: bool = False):
        self._rank = f"rank{rank}"
        self._empty = empty

    def state_dict(self) -> dict[str, Any]:
        if self._empty:
            return {}
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "python": random.getstate(),
        }
        if "torch_xla" in sys.modules:
            from torch_xla_ckpt.device import xla

            state["xla"] = xla.seed()
        return {self._rank: state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = state.get(self._rank)
        if own is None:
            logger.warning("the checkpoint has no random generators of %s; they stay as they are", self._rank)
            return
        torch.set_rng_state(own["torch"])
        np.random.set_state(own["numpy"])
        random.setstate(own["python"])
        if "xla" in own and "torch_xla" in sys.modules:
            from torch_xla_ckpt.device import xla

            xla.set_seed(own["xla"])

"""The states of all random generators of a process."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torch_xla_ckpt.device import lazy


def random_state() -> dict[str, Any]:
    """Return the state of torch's, numpy's and Python's generators, and the seed of the XLA devices."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if "torch_xla" in sys.modules:
        state["xla"] = lazy.xla.seed()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set all generators to what ``random_state`` returned. Without torch_xla, the seed of the devices is ignored."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "xla" in state and "torch_xla" in sys.modules:
        lazy.xla.set_seed(state["xla"])

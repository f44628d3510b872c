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
    numbers: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        # Without arrays, so that ``torch.load(weights_only=True)`` reads it.
        "numpy": {**numbers, "state": {**numbers["state"], "key": tuple(numbers["state"]["key"].tolist())}},
        "python": random.getstate(),
    }
    if "torch_xla" in sys.modules:
        state["xla"] = lazy.xla.seed()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set all generators to what ``random_state`` returned. Without torch_xla, the seed of the devices is ignored."""
    torch.set_rng_state(state["torch"])
    numbers = state["numpy"]
    key = np.asarray(numbers["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numbers, "state": {**numbers["state"], "key": key}})
    random.setstate(state["python"])
    if "xla" in state and "torch_xla" in sys.modules:
        lazy.xla.set_seed(state["xla"])

"""Arguments of a restore: those of another kind are refused by name, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def require_kinds(*, model: Any, optimizer: Any, state: Any, sharding: Any, placement: Any) -> None:
    """Refuse arguments of another kind than ``restore`` takes.

    Args: see ``restore``; None for each that was not given.

    Raises:
        TypeError: naming the argument, what it takes, and what to pass instead.
    """
    for name, value, kind in (("model", model, torch.nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if value is not None and not isinstance(value, kind):
            _refuse(name, f"an object of the class {kind.__name__}", value, "To fill a dict, pass it in state=")
    if state is not None and not isinstance(state, dict):
        _refuse("state", "a dict", state, "Pass a module or an optimizer as model= or optimizer=")
    if sharding is not None and not callable(sharding) and not isinstance(sharding, Mapping):
        takes = 'partition specs by name patterns, such as {"*.weight": ("fsdp", None)}, or a function of a module'
        _refuse("sharding", takes, sharding, 'Put the spec for all tensors under the pattern "*"')
    if placement is not None and not callable(placement):
        _refuse("placement", "a function of key, shape and dtype", placement, "Shard a model's tensors with sharding=")


def _refuse(name: str, takes: str, value: Any, remedy: str) -> None:
    described = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    raise TypeError(f"{name}= takes {takes}, not {described}. Nothing was changed. {remedy}")

"""prime_optimizer: optimizer state from host memory is sharded like its parameters."""

from __future__ import annotations

from typing import Any

import torch

from torch_xla_ckpt.device import access_of, make
from torch_xla_ckpt.planner import copy_into, mark_primed


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Register a hook that shards loaded optimizer state like its parameters, and return the optimizer.

    For programs that were written for torch_xla's planners. There, a dummy step had to create the optimizer's state.
    Here a load creates state that is absent, in host memory, and ``optimizer.load_state_dict`` shards that state from
    then on. No step runs. ``restore`` needs no priming.
    """
    optimizer.register_load_state_dict_pre_hook(sharded_state)
    optimizer.register_state_dict_post_hook(mark_primed)
    return optimizer


def sharded_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict whose host tensors are on devices if they fit a parameter there.

    A tensor fits if it has the parameter's shape. It then gets the parameter's sharding.
    """
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    by_name = dict(zip(names, params))
    state: dict[Any, Any] = {
        name: dict(own) if isinstance(own, dict) else own for name, own in state_dict["state"].items()
    }
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, own in state.items():
        if name not in by_name or not isinstance(own, dict):
            continue
        param = by_name[name]
        for part, value in own.items():
            if _is_on_host(value) and param.device.type == "xla" and value.shape == param.shape and value.ndim:
                own[part] = make(value.shape, value.dtype, param)
                pairs.append((own[part], value))
    copy_into(pairs, access_of)
    return {**state_dict, "state": state}


def _is_on_host(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"

"""Loaded objects on their way into the target: tensors inside them keep their devices and their sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla_ckpt.planner.targets import copy_into
from torch_xla_ckpt.protocols import TensorAccess


def updated_object(old: Any, loaded: Any, access_of: Callable[[torch.Tensor], TensorAccess]) -> Any:
    """Return the object that replaces ``old`` in the target.

    A tuple of tensors, for example, is saved as one object. Its loaded tensors are copied into the target's tensors at
    the same positions, if the shapes are equal. Everything else is replaced.

    Args:
        old: the object in the target.
        loaded: the object from the checkpoint.
        access_of: returns the access that writes to a tensor of the target.
    """
    if type(loaded) is dict and not loaded and isinstance(old, Mapping) and not old:
        return old
    try:
        old_values, structure = pytree.tree_flatten(old)
        if not any(isinstance(value, torch.Tensor) for value in old_values):
            return loaded
        new_values = structure.flatten_up_to(loaded)  # goes no deeper into the loaded object than into the target's
    except ValueError:  # the structures differ
        return loaded
    except RecursionError:  # torch cannot walk an object that is nested too deep, or that contains itself
        return loaded
    copied = False
    for position, (target, value) in enumerate(zip(old_values, new_values)):
        if not isinstance(target, torch.Tensor) or not isinstance(value, torch.Tensor):
            continue
        if _is_strided(target) and _is_strided(value) and target.shape == value.shape:
            copy_into([(target, value)], access_of)
            new_values[position] = target
            copied = True
    return structure.unflatten(new_values) if copied else loaded


def _is_strided(tensor: torch.Tensor) -> bool:
    """Whether copying the elements copies the tensor; a quantized tensor, for example, also has a scale."""
    return not tensor.is_quantized and not tensor.is_nested and tensor.layout == torch.strided

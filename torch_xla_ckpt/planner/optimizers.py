"""Optimizer state in checkpoints and targets, told by the names in its keys' paths."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.state import Path


class OptimizerPaths:
    """The optimizers in a checkpoint: mappings that have "param_groups" beside "state".

    Args:
        paths: path of every saved key.
    """

    def __init__(self, paths: Mapping[str, Path]):
        self._paths = paths
        self._optimizers = {path[: path.index("param_groups")] for path in paths.values() if "param_groups" in path}

    def state_path(self, path: Path) -> Path | None:
        """Return the path of the optimizer's state that contains ``path``; None if no optimizer's state does."""
        return next((path[:depth] for depth in range(1, len(path)) if self._is_state(path[:depth])), None)

    def keyed_by_integers(self, path: Path) -> bool:
        """Whether ``path`` is the state of an optimizer that numbers its parameters, as torch's optimizers do.

        Checkpoints of this package record which keys are integers, so the answer for these is False.
        """
        if not self._is_state(path):
            return False
        return not any(isinstance(element, _dcp.IntegerKey) for own in self._paths.values() for element in own)

    def _is_state(self, path: Path) -> bool:
        return bool(path) and path[-1] == "state" and path[:-1] in self._optimizers


class PrimedState(OrderedDict[Any, Any]):
    """The empty state of a primed optimizer, which shards the state that it loads: no warning is needed.

    Pickled as an ``OrderedDict``, so that files with it need no class of this package.
    """

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())


def mark_primed(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Mark the empty state of a primed optimizer: a hook for ``register_state_dict_post_hook``.

    Args:
        optimizer: the optimizer; not used.
        state_dict: the optimizer's state dict.
    """
    return state_dict if state_dict["state"] else {**state_dict, "state": PrimedState()}


def is_primed(state_dict: Mapping[Any, Any], path: Path) -> bool:
    """Whether the optimizer state at ``path`` of a target belongs to a primed optimizer."""
    here: Any = state_dict
    for element in path:
        here = here.get(element) if isinstance(here, Mapping) else None
    return isinstance(here, PrimedState)

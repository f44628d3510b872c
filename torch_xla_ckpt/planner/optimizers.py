"""Where a checkpoint has optimizer state, told by the names in its keys' paths."""

from __future__ import annotations

from collections.abc import Mapping

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

    def has(self, path: Path) -> bool:
        """Whether the value at ``path`` is part of an optimizer's state."""
        return any(self._is_state(path[:depth]) for depth in range(1, len(path)))

    def keyed_by_integers(self, path: Path) -> bool:
        """Whether ``path`` is the state of an optimizer that numbers its parameters, as torch's optimizers do.

        Checkpoints of this package record which keys are integers, so the answer for these is False.
        """
        if not self._is_state(path):
            return False
        return not any(isinstance(element, _dcp.IntegerKey) for own in self._paths.values() for element in own)

    def _is_state(self, path: Path) -> bool:
        return bool(path) and path[-1] == "state" and path[:-1] in self._optimizers

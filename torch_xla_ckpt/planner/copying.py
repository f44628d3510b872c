"""CopyPlanner: saves a checkpoint's keys again, from the values that another checkpoint has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from torch_xla_ckpt.planner.save import SPMDSavePlanner
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.state import Path


class CopyPlanner(SPMDSavePlanner):
    """``SPMDSavePlanner`` for a flat state dict whose keys have had other paths before.

    Args:
        paths: the path to record for each key. Keys without one keep their own.
        access: returns the access that reads a tensor.
    """

    def __init__(self, paths: Mapping[str, Path], access: Callable[[torch.Tensor], TensorAccess]):
        super().__init__(access=access)
        self._paths = paths

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._leaves = {key: leaf._replace(path=self._paths.get(key, leaf.path)) for key, leaf in self._leaves.items()}

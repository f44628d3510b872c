"""Checkpoints for PyTorch/XLA SPMD on top of torch.distributed.checkpoint."""

from torch_xla_ckpt.api import load, save
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError, MismatchError, UnsafeObjectError
from torch_xla_ckpt.planner import SPMDLoadPlanner, SPMDSavePlanner

__all__ = [
    "CheckpointError",
    "IncompleteCheckpointError",
    "MismatchError",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "UnsafeObjectError",
    "load",
    "save",
]

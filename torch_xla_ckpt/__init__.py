"""Checkpoints for PyTorch/XLA SPMD on top of torch.distributed.checkpoint."""

from torch_xla_ckpt.api import load, save
from torch_xla_ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    Damage,
    IncompleteCheckpointError,
    MismatchError,
    UnsafeObjectError,
)
from torch_xla_ckpt.planner import SPMDLoadPlanner, SPMDSavePlanner
from torch_xla_ckpt.report import LoadReport
from torch_xla_ckpt.storage import ShardReader, ShardWriter, VerifyReport, verify

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "Damage",
    "IncompleteCheckpointError",
    "LoadReport",
    "MismatchError",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "ShardReader",
    "ShardWriter",
    "UnsafeObjectError",
    "VerifyReport",
    "load",
    "save",
    "verify",
]

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
from torch_xla_ckpt.report import LoadReport, Outcome
from torch_xla_ckpt.restoring import prime_optimizer, restore
from torch_xla_ckpt.storage import ShardReader, ShardWriter, VerifyReport, verify

__all__ = [
    "CheckpointError",
    "CorruptCheckpointError",
    "Damage",
    "IncompleteCheckpointError",
    "LoadReport",
    "MismatchError",
    "Outcome",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "ShardReader",
    "ShardWriter",
    "UnsafeObjectError",
    "VerifyReport",
    "load",
    "prime_optimizer",
    "restore",
    "save",
    "verify",
]

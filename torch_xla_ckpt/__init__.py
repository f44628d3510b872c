"""Checkpoints for PyTorch/XLA SPMD on top of torch.distributed.checkpoint."""

from torch_xla_ckpt.api import async_save, load, save
from torch_xla_ckpt.errors import (
    CheckpointError,
    ConcurrentSaveError,
    CorruptCheckpointError,
    Damage,
    IncompleteCheckpointError,
    Mismatch,
    MismatchError,
    ReplacedCheckpointError,
    UnsafeObjectError,
)
from torch_xla_ckpt.exchange import export
from torch_xla_ckpt.inspecting import Contents, Difference, Explanation, RunContents, diff, explain, inspect
from torch_xla_ckpt.manager import CheckpointManager, History, Record, Verdict, keep, when
from torch_xla_ckpt.planner import SPMDLoadPlanner, SPMDSavePlanner
from torch_xla_ckpt.reports import ExportReport, LoadReport, Outcome, RequestCounts, SaveReport, Span, Timeline
from torch_xla_ckpt.restoring import prime_optimizer, restore
from torch_xla_ckpt.staging import AsyncSave, Choice, SPMDStager
from torch_xla_ckpt.state import PerRank
from torch_xla_ckpt.storage import ShardReader, ShardWriter, VerifyReport, verify

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "CheckpointManager",
    "Choice",
    "ConcurrentSaveError",
    "Contents",
    "CorruptCheckpointError",
    "Damage",
    "Difference",
    "Explanation",
    "ExportReport",
    "History",
    "IncompleteCheckpointError",
    "LoadReport",
    "Mismatch",
    "MismatchError",
    "Outcome",
    "PerRank",
    "Record",
    "ReplacedCheckpointError",
    "RequestCounts",
    "RunContents",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "SPMDStager",
    "SaveReport",
    "ShardReader",
    "ShardWriter",
    "Span",
    "Timeline",
    "UnsafeObjectError",
    "Verdict",
    "VerifyReport",
    "async_save",
    "diff",
    "explain",
    "export",
    "inspect",
    "keep",
    "load",
    "prime_optimizer",
    "restore",
    "save",
    "verify",
    "when",
]

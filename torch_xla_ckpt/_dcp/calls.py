"""``dcp.save`` and ``dcp.load`` without their preparations: state dicts must hold no ``Stateful`` any more."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.distributed.checkpoint.utils import _DistWrapper as DistWrapper

__all__ = ["DistWrapper", "fail_to_save", "load", "save"]


def save(
    state_dict: dict[str, Any],
    writer: StorageWriter,
    planner: SavePlanner,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
) -> Metadata:
    """Save a state dict as ``dcp.save`` does.

    Raises:
        CheckpointException: a rank failed.
    """
    return _save_state_dict(state_dict, writer, process_group, no_dist=no_dist, planner=planner)


def load(
    state_dict: dict[str, Any],
    reader: StorageReader,
    planner: LoadPlanner,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
) -> None:
    """Load into a state dict as ``dcp.load`` does.

    Raises:
        CheckpointException: a rank failed.
    """
    _load_state_dict(state_dict, reader, process_group, no_dist=no_dist, planner=planner)


def fail_to_save(error: BaseException, group: dist.ProcessGroup | None) -> None:
    """Take part in a save that has already failed on this rank, so that the other ranks learn of the error.

    Raises:
        CheckpointException: always.
    """

    def fail() -> None:
        raise error

    DistWrapper(group, True, 0).reduce_scatter("plan", fail, lambda plans: plans)

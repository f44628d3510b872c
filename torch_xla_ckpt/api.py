"""Saving and loading in one call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.planner import SPMDLoadPlanner, SPMDSavePlanner
from torch_xla_ckpt.planner.objects import AllowedType

_Path = str | os.PathLike[str]


def save(
    state_dict: dict[str, Any],
    path: _Path | None = None,
    *,
    storage_writer: dcp.StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Save a state dict as a DCP checkpoint: ``dcp.save`` with ``SPMDSavePlanner``.

    Args:
        state_dict: nested dicts, lists, tensors, objects and ``Stateful``s. Every process of the group passes its own.
        path: folder or fsspec URL; not needed when the storage writer knows it.
        storage_writer: DCP storage to write with. Default: DCP's own for the path.
        process_group: a group whose backend gathers objects of the host, gloo for example. Default: the default
            group, or none when torch.distributed is not initialised.
        no_dist: save from this process alone even if there is a group.

    Returns:
        The checkpoint's metadata.

    Raises:
        IncompleteCheckpointError: the processes do not hold every element exactly once.
        CheckpointError: anything else that failed, on any rank, with the rank and the cause.
    """
    with _unwrapped("saved", no_dist):
        return dcp.save(
            state_dict,
            checkpoint_id=path,
            storage_writer=storage_writer,
            planner=SPMDSavePlanner(),
            process_group=process_group,
            no_dist=no_dist or not _initialized(),
        )


def load(
    state_dict: dict[str, Any],
    path: _Path | None = None,
    *,
    allow_types: Sequence[AllowedType] = (),
    trust_pickle: bool = False,
    storage_reader: dcp.StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load a DCP checkpoint in place: ``dcp.load`` with ``SPMDLoadPlanner``.

    Args:
        state_dict: the target. Its tensors are overwritten in place, each in the sharding it has.
        path: folder or fsspec URL; not needed when the storage reader knows it.
        allow_types, trust_pickle: see ``SPMDLoadPlanner``.
        storage_reader: DCP storage to read with. Default: DCP's own for the path.
        process_group, no_dist: see ``save``.

    Raises:
        MismatchError: keys are missing from the checkpoint or have another shape.
        IncompleteCheckpointError: the saved chunks do not cover the target.
        UnsafeObjectError: an object has a type that is not allowed.
        CheckpointError: anything else that failed, on any rank, with the rank and the cause.
    """
    with _unwrapped("loaded", no_dist):
        dcp.load(
            state_dict,
            checkpoint_id=path,
            storage_reader=storage_reader,
            planner=SPMDLoadPlanner(allow_types=allow_types, trust_pickle=trust_pickle),
            process_group=process_group,
            no_dist=no_dist or not _initialized(),
        )


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _unwrapped(done: str, no_dist: bool) -> Iterator[None]:
    """Turn DCP's ``CheckpointException``, which ``except Exception`` does not catch, into one of our errors."""
    with warnings.catch_warnings():
        # What the caller asked for, and what DCP does inside: nothing that a warning at every save would change.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        try:
            yield
        except CheckpointException as error:
            raise _cause(error, done, several=_initialized() and not no_dist) from error


def _cause(error: CheckpointException, done: str, several: bool) -> BaseException:
    """The most telling of the ranks' failures, with the rank in its message."""
    causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
    for cause in causes.values():
        if not isinstance(cause, Exception):  # KeyboardInterrupt, SystemExit
            return cause
    rank = next((rank for rank, cause in causes.items() if isinstance(cause, CheckpointError)), next(iter(causes)))
    cause = causes[rank]
    where = f"rank {rank}: " if several else ""
    others = f" (ranks {', '.join(str(r) for r in causes if r != rank)} failed too)" if len(causes) > 1 else ""
    if isinstance(cause, CheckpointError):
        cause.args = (f"{where}{cause}{others}", *cause.args[1:])
        return cause
    text = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
    if isinstance(cause, AssertionError) and done == "loaded":
        text = "there is no checkpoint there whose metadata can be read"  # DCP asserts that it has some
    return CheckpointError(f"the checkpoint could not be {done}: {where}{text}{others}")

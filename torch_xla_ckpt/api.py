"""Saving and loading in one call."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import ReplacedCheckpointError
from torch_xla_ckpt.planner import Dtype, Missing, Place, Rename, Shape, SPMDLoadPlanner, SPMDSavePlanner, Unexpected
from torch_xla_ckpt.reports import LoadReport, Timeline
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.serialization import AllowedType
from torch_xla_ckpt.staging import AsyncSave, SPMDStager
from torch_xla_ckpt.storage import Location, ReadStats, ShardReader, ShardWriter, path_lock

logger = logging.getLogger(__name__)

_Path = str | os.PathLike[str]
RESTARTS = 20
"""How often a load begins again because the checkpoint was replaced."""


@without_collector
def save(
    state_dict: dict[str, Any],
    path: _Path | None = None,
    *,
    sync: bool = True,
    step: int | None = None,
    user_metadata: Any = None,
    progress: bool = False,
    storage_writer: dcp.StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Save a state dict as a DCP checkpoint: ``dcp.save`` with ``SPMDSavePlanner`` and ``ShardWriter``.

    A checkpoint that is there already is replaced in one step: until then it stays whole. If a save in the background
    is writing to the same path, this waits for it.

    Args:
        state_dict: nested dicts, lists, tensors, objects and ``Stateful``s. Every process of the group passes its own.
        path: folder or fsspec URL; not needed when a storage writer that knows it is given.
        sync, step, user_metadata, progress: see ``ShardWriter``, which has further options.
        storage_writer: DCP storage to write with; then the options before it are its own. Default: a ``ShardWriter``.
        process_group: a group whose backend gathers objects of the host, gloo for example. Default: the default
            group, or none when torch.distributed is not initialised.
        no_dist: save from this process alone even if there is a group.

    Returns:
        The checkpoint's metadata.

    Raises:
        IncompleteCheckpointError: the processes do not hold every element exactly once.
        CheckpointError: anything else that failed, on any rank, with the rank and the cause.
    """
    if storage_writer is None:
        storage_writer = ShardWriter(given(path), sync=sync, step=step, user_metadata=user_metadata, progress=progress)
    elif path is not None:
        storage_writer.reset(path)
    if (location := _location(storage_writer)) is not None:
        path_lock.wait_for(location)
    doing = f"saving to {location or 'a storage writer'}"
    with agreed(process_group, no_dist, doing):
        state = {key: _dcp.state_of(value) for key, value in state_dict.items()}
    together = Processes(process_group, no_dist).worded(doing, only_collectives=False)
    with together, _unwrapped("saved", no_dist), _abandoning(storage_writer):
        return _dcp.save(state, storage_writer, SPMDSavePlanner(), process_group, no_dist or not _initialized())


def async_save(
    state_dict: dict[str, Any],
    path: _Path | None = None,
    *,
    stager: SPMDStager,
    sync: bool = True,
    step: int | None = None,
    user_metadata: Any = None,
    storage_writer: dcp.StorageWriter | None = None,
) -> AsyncSave:
    """``save`` in the background: returns as soon as the state may change, in milliseconds where devices have room.

    Args:
        state_dict: as for ``save``. Everything in it is copied, also what lies in host memory.
        path: as for ``save``.
        stager: makes the copy, and runs the save. Its processes save together, and all must call this.
        sync, step, user_metadata, storage_writer: as for ``save``.

    Returns:
        Futures that tell how the save goes. Who does not ask them gets an error from the stager's next call.

    Raises:
        CheckpointError: the state cannot be copied; or an earlier save failed, and nobody has asked how it ended.
    """
    if storage_writer is None:
        storage_writer = ShardWriter(given(path), sync=sync, step=step, user_metadata=user_metadata)
    elif path is not None:
        storage_writer.reset(path)
    writer = storage_writer

    def state() -> dict[str, Any]:
        return {key: _dcp.state_of(value) for key, value in state_dict.items()}

    def write(copied: dict[str, Any], group: dist.ProcessGroup | None, timeline: Timeline) -> Metadata:
        if isinstance(writer, ShardWriter):
            writer.timeline = timeline
        with _abandoning(writer):
            return _dcp.save(copied, writer, SPMDSavePlanner(), group, group is None)

    return stager.run(state, write, _location(writer))


@without_collector
def load(
    state_dict: dict[str, Any],
    path: _Path | None = None,
    *,
    missing: Missing = "error",
    unexpected: Unexpected = "restore",
    dtype: Dtype = "cast",
    shape: Shape = "error",
    rename: Rename | None = None,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    placement: Place | None = None,
    allow_types: Sequence[AllowedType] = (),
    trust_pickle: bool = False,
    verify: bool = True,
    progress: bool = False,
    storage_reader: dcp.StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadReport:
    """Load a DCP checkpoint in place: ``dcp.load`` with ``SPMDLoadPlanner`` and ``ShardReader``.

    Args:
        state_dict: the target. Its tensors are overwritten in place, each in the sharding it has; what it lacks is
            inserted.
        path: folder or fsspec URL; not needed when a storage reader that knows it is given.
        missing, unexpected, dtype, shape, rename, only, exclude, placement, allow_types, trust_pickle: what to do where
            target and checkpoint differ; see ``SPMDLoadPlanner``.
        verify, progress: see ``ShardReader``, which has further options.
        storage_reader: DCP storage to read with; then the options before it are its own. Default: a ``ShardReader``.
        process_group, no_dist: see ``save``.

    Returns:
        What became of every key, what was read, and how long it took.

    Raises:
        MismatchError: target and checkpoint do not fit each other, and the policy does not allow it.
        IncompleteCheckpointError: the saved chunks do not cover the target.
        CorruptCheckpointError: bytes are not what was written.
        ReplacedCheckpointError: other saves replaced the checkpoint again and again while it was read.
        UnsafeObjectError: an object has a type that is not allowed.
        CheckpointError: anything else that failed, on any rank, with the rank and the cause.
    """
    start = time.perf_counter()
    if storage_reader is None:
        storage_reader = ShardReader(given(path), verify=verify, progress=progress)
    elif path is not None:
        storage_reader.reset(path)
    keys = sorted(state_dict)  # every rank asks the values for their states in the same order
    doing = f"loading from {getattr(storage_reader, 'location', None) or 'a storage reader'}"
    with agreed(process_group, no_dist, doing):
        state = {key: _dcp.state_of(state_dict[key]) for key in keys}
    # ``restore`` loads in several steps, and begins all of them again.
    most = 0 if isinstance(storage_reader, ShardReader) and storage_reader.is_pinned else RESTARTS
    for restarts in range(most + 1):
        planner = SPMDLoadPlanner(
            missing=missing,
            unexpected=unexpected,
            dtype=dtype,
            shape=shape,
            rename=rename,
            only=only,
            exclude=exclude,
            placement=placement,
            allow_types=allow_types,
            trust_pickle=trust_pickle,
        )
        try:
            together = Processes(process_group, no_dist).worded(doing, only_collectives=False)
            with together, _unwrapped("loaded", no_dist):
                _dcp.load(state, storage_reader, planner, process_group, no_dist or not _initialized())
            break
        except BaseException as error:
            planner.undo()  # another process may have failed when this one had everything
            # All processes get the same error, so all of them begin again.
            if not isinstance(error, ReplacedCheckpointError) or restarts == most:
                raise
            logger.warning("%s", error)
            storage_reader.reset()
    for key in keys:
        if _dcp.is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(state[key])
        else:
            state_dict[key] = state[key]
    total = time.perf_counter() - start
    plan = planner.planned_at - start
    stats = getattr(storage_reader, "stats", None)
    return LoadReport(
        outcomes=planner.outcomes,
        bytes_needed=stats.bytes_needed if isinstance(stats, ReadStats) else None,
        bytes_read=stats.bytes_read if isinstance(stats, ReadStats) else None,
        plan_seconds=plan,
        read_seconds=total - plan - planner.put_seconds,
        put_seconds=planner.put_seconds,
        restarts=restarts,
    )


@contextmanager
def _abandoning(writer: dcp.StorageWriter) -> Iterator[None]:
    """Tell a storage writer that its save has failed; DCP tells it nothing."""
    try:
        yield
    except BaseException:
        if isinstance(writer, ShardWriter):
            writer.abandon()
        raise


def agreed(
    process_group: dist.ProcessGroup | None, no_dist: bool, doing: str = "making or restoring the state"
) -> AbstractContextManager[None]:
    """Let what fails in one process's block fail in all, before any of them goes on to wait for it.

    Args:
        process_group, no_dist: see ``save``.
        doing: what the block does and to which path, for the error; the same on all ranks.

    Raises:
        CheckpointError: with the rank and what it raised, where it was another's; or naming the ranks that did not
            come.
    """
    return Processes(process_group, no_dist).agreed(doing)


def _location(storage: dcp.StorageWriter) -> Location | None:
    """Where a storage writer writes; None if it does not say."""
    if isinstance(storage, ShardWriter):
        return storage.location
    path = getattr(storage, "checkpoint_id", None)
    return Location.of(path) if path else None


def given(path: _Path | None) -> _Path:
    """``path``, or the error that says that it is needed."""
    if path is None:
        raise ValueError("say where the checkpoint lies: pass a path, or a storage writer or reader that knows it")
    return path


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _unwrapped(done: str, no_dist: bool) -> Iterator[None]:
    """Turn DCP's ``CheckpointException``, which ``except Exception`` does not catch, into one of our errors."""
    with warnings.catch_warnings():
        # What DCP does inside: nothing that a warning at every save would change.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        try:
            yield
        except CheckpointException as error:
            raise _dcp.cause(error, done, several=_initialized() and not no_dist) from error

"""Save, async save and load, one call each: check the arguments, call the rooms below, turn DCP's errors into ours."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.cooperation import agree
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError, ReplacedCheckpointError
from torch_xla_ckpt.planner import Dtype, Missing, Place, Rename, Shape, SPMDLoadPlanner, SPMDSavePlanner, Unexpected
from torch_xla_ckpt.reports import LOCK, LoadReport, Timeline
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.serialization import AllowedType
from torch_xla_ckpt.staging import AsyncSave, SPMDStager, default_stager
from torch_xla_ckpt.storage import (
    Location,
    PathLike,
    ReadStats,
    ShardReader,
    ShardWriter,
    is_interrupt,
    open_reader,
    open_writer,
    path_lock,
    path_of,
)

logger = logging.getLogger(__name__)

RESTARTS = 20
"""Number of times that a load begins again because another save replaced the checkpoint."""


@without_collector
def save(
    state_dict: dict[str, Any],
    path: PathLike | None = None,
    *,
    sync: bool = True,
    step: int | None = None,
    user_metadata: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
    storage_writer: dcp.StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Save a state dict as a DCP checkpoint: ``dcp.save`` with ``SPMDSavePlanner`` and ``ShardWriter``.

    A checkpoint that exists at the path stays whole until the commit replaces it in one step. If an async save is
    writing to the same path, this call waits for it.

    Args:
        state_dict: nested dicts and lists of tensors, objects and ``Stateful``s. Every rank passes its own.
        path: the checkpoint's folder, a local path or an fsspec URL. Needed unless ``storage_writer`` has a path.
        sync, step, user_metadata, progress: see ``ShardWriter``, which has further options. Without effect if
            ``storage_writer`` is given.
        storage_options: options of fsspec's filesystem for a URL, for example credentials. Default: none.
        storage_writer: DCP storage to write with. Default: a ``ShardWriter``.
        process_group: a group whose backend gathers Python objects, for example gloo. Default: the default group, or
            no group if torch.distributed is not initialised.
        no_dist: whether to save from this process alone although there is a group. Default: False.

    Returns:
        The checkpoint's metadata, which prints as one line. Its ``report`` is a ``SaveReport``: where the time went,
        and the requests to a store.

    Raises:
        ValueError: there is no path; ``path`` is not the path of ``storage_writer``; or ``storage_options`` is given
            beside ``storage_writer``.
        IncompleteCheckpointError: the ranks do not hold every element of a tensor exactly once.
        CheckpointError: any other failure, on any rank, with the rank and the cause.
    """
    writer = open_writer(
        path, storage_writer, storage_options, sync=sync, step=step, user_metadata=user_metadata, progress=progress
    )
    location = _location(writer)
    with (writer.announce() if isinstance(writer, ShardWriter) else Timeline()).span(LOCK):
        if location is not None:
            path_lock.wait_for(location)
    doing = f"saving to {location or 'a storage writer'}"
    processes = Processes(process_group, no_dist)
    with processes.agreed(doing):
        state = _states(state_dict, "saved")
    with readable_errors(processes, doing, "saved"), _abandoned_on_error(writer):
        if isinstance(writer, ShardWriter) and processes.alone:
            writer.look()
        return _shortened(writer, _dcp.save(state, writer, SPMDSavePlanner(), process_group, processes.alone))


def async_save(
    state_dict: dict[str, Any],
    path: PathLike | None = None,
    *,
    stager: SPMDStager | None = None,
    sync: bool = True,
    step: int | None = None,
    user_metadata: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    storage_writer: dcp.StorageWriter | None = None,
) -> AsyncSave:
    """Copy a state dict and save the copy in a thread: an async save.

    Returns when the state may change, after milliseconds if the devices have room for the copy.

    Args:
        state_dict: as for ``save``. Tensors and objects in host memory are copied too.
        path: as for ``save``.
        stager: makes the copy and runs the save. All ranks of its process group must call this at the same point.
            Default: a stager of the process's own with the options of ``SPMDStager()``. The first call makes it, and
            it is closed when the program exits, after its saves have ended. With several ranks, it saves together with
            all ranks of the default group, so all of them must make this first call.
        sync, step, user_metadata, storage_options, storage_writer: as for ``save``.

    Returns:
        The futures of the save. If nobody reads the error of a failed save from them, the stager's next call raises
        it; for the process's own stager, that is the next ``async_save`` without ``stager``. An error of one rank is
        raised there at once, and by the futures of the other ranks, which name the rank.

    Raises:
        ValueError: as for ``save``.
        CheckpointError: the state cannot be copied; or an earlier save failed, and nobody has read its error. In one
            process, nothing was saved. With several ranks, the save of this call has begun, so that all ranks stay in
            step; the stager's next call raises its error if it fails.
    """
    stager = stager or default_stager()
    with stager.preparing():
        writer = open_writer(
            path, storage_writer, storage_options, sync=sync, step=step, user_metadata=user_metadata, progress=False
        )
    return save_staged(state_dict, writer, stager)


def save_staged(
    state_dict: dict[str, Any],
    writer: dcp.StorageWriter,
    stager: SPMDStager,
    *,
    before_writing: Callable[[], None] | None = None,
    raises_earlier: bool = True,
) -> AsyncSave:
    """Copy a state dict and save the copy in the stager's thread; see ``async_save``.

    Args:
        state_dict: the state.
        writer: the DCP storage to write with.
        stager: makes the copy and runs the save.
        before_writing: called in the stager's thread before the save begins there. Default: nothing is called.
        raises_earlier: see ``SPMDStager.run``.
    """

    def write(copied: dict[str, Any], group: dist.ProcessGroup | None, timeline: Timeline) -> Metadata:
        if isinstance(writer, ShardWriter):
            writer.timeline = timeline
        with _abandoned_on_error(writer):
            with _failing_on_all_ranks(group):
                if before_writing is not None:
                    with timeline.span("wait for deletions"):
                        before_writing()
                if isinstance(writer, ShardWriter):
                    writer.announce(timeline.seconds().get(LOCK, 0.0))
                    if group is None:
                        writer.look()
            return _shortened(writer, _dcp.save(copied, writer, SPMDSavePlanner(), group, group is None))

    with stager.preparing():
        location = _location(writer)
    return stager.run(lambda: _states(state_dict, "saved"), write, location, raises_earlier=raises_earlier)


@without_collector
def load(
    state_dict: dict[str, Any],
    path: PathLike | None = None,
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
    cooperative: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
    storage_reader: dcp.StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> LoadReport:
    """Load a checkpoint in place: ``dcp.load`` with ``SPMDLoadPlanner`` and ``ShardReader``.

    The checkpoint is a DCP checkpoint of any writer, a safetensors file or folder, or a ``torch.save`` file.

    Args:
        state_dict: the target. Its tensors are overwritten in place and keep their sharding. Saved keys that it lacks
            are inserted.
        path: the checkpoint's folder or file, a local path or an fsspec URL. Needed unless ``storage_reader`` has a
            path.
        missing, unexpected, dtype, shape, rename, only, exclude, placement, allow_types, trust_pickle: the policy for
            differences between target and checkpoint; see ``SPMDLoadPlanner``.
        verify, progress: see ``ShardReader``, which has further options. Without effect if ``storage_reader`` is given.
        cooperative: whether each byte that several ranks need is read by one of them, which passes it on to the others
            over the process group; the index of the checkpoint too. True: yes, from any storage. False: every rank
            reads what it needs. None (default): yes, if the checkpoint is in a store and this saves reading 64 MiB or
            more. Without effect in a single process. ``docs/scale.md`` explains it.
        storage_options: options of fsspec's filesystem for a URL, for example credentials. Default: none.
        storage_reader: DCP storage to read with. Default: a ``ShardReader``.
        process_group, no_dist: as for ``save``.

    Returns:
        What was done with every key, the bytes that were read, and the seconds that each phase took.

    Raises:
        ValueError: there is no path; ``path`` is not the path of ``storage_reader``; or ``storage_options`` is given
            beside ``storage_reader``.
        MismatchError: target and checkpoint differ, and the policy does not allow the difference.
        IncompleteCheckpointError: the saved chunks do not cover a tensor of the target.
        CorruptCheckpointError: the bytes of a file are not those that were saved.
        ReplacedCheckpointError: other saves kept replacing the checkpoint while it was read.
        UnsafeObjectError: an object has a type that is not allowed.
        CheckpointError: any other failure, on any rank, with the rank and the cause.
    """
    start = time.perf_counter()
    reader = open_reader(path, storage_reader, storage_options, verify=verify, progress=progress)
    doing = f"loading from {path_of(reader) or 'a storage reader'}"
    processes = Processes(process_group, no_dist)
    _require_state_dict(state_dict)
    keys = sorted(state_dict)  # all ranks call ``state_dict`` of their values in the same order
    with processes.agreed(doing):
        state = _states({key: state_dict[key] for key in keys}, "loaded")

    def new_planner() -> SPMDLoadPlanner:
        return SPMDLoadPlanner(
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

    def load_once(planner: SPMDLoadPlanner) -> None:
        with readable_errors(processes, doing, "loaded"):
            _dcp.load(state, reader, planner, process_group, processes.alone)

    with reading_together(reader, processes, cooperative, doing):
        planner, restarts = _load_unreplaced(load_once, new_planner, reader)
    for key in keys:
        if _dcp.is_stateful(state_dict[key]):
            state_dict[key].load_state_dict(state[key])
        else:
            state_dict[key] = state[key]
    report = _report(planner, reader, start, restarts)
    if not keys and report.outcomes:
        logger.warning(
            "%s: the state dict is empty, so nothing was loaded. Name what to load: {'model': {}} loads all of 'model'",
            doing,
        )
    return report


def reading_together(
    reader: dcp.StorageReader, processes: Processes, cooperative: bool | None, doing: str
) -> AbstractContextManager[None]:
    """Let the ranks read each byte once in the block, if they agree to. All ranks must call this, and enter the block.

    Args:
        reader: the storage reader.
        processes: the ranks.
        cooperative: as for ``load``.
        doing: the operation, for errors.

    Raises:
        CheckpointError: the ranks want different things.
    """
    ours = reader if isinstance(reader, ShardReader) else None
    if ours is not None and ours.is_together:
        return nullcontext()
    is_remote = ours is not None and not ours.location.is_local
    path = "" if ours is None else ours.location.identity
    agreement = agree(processes, cooperative, can=ours is not None, is_remote=is_remote, path=path, doing=doing)
    return nullcontext() if ours is None else ours.together(agreement)


def agreed(
    process_group: dist.ProcessGroup | None, no_dist: bool, doing: str = "making or restoring the state"
) -> AbstractContextManager[None]:
    """Raise an error of one rank's block on all ranks; see ``Processes.agreed``."""
    return Processes(process_group, no_dist).agreed(doing)


def _location(writer: dcp.StorageWriter) -> Location | None:
    """Return the location that a storage writer writes to; None if it does not tell."""
    path = path_of(writer)
    return None if path is None else Location.of(path)


def _shortened(writer: dcp.StorageWriter, metadata: Metadata) -> Metadata:
    """Return a save's metadata, which prints as one line on every rank if a ``ShardWriter`` wrote it."""
    return writer.shorten(metadata) if isinstance(writer, ShardWriter) else metadata


def _states(state_dict: dict[str, Any], done: str) -> dict[str, Any]:
    """Return the state dict with the state of each ``Stateful`` in its place.

    Args:
        state_dict: the state.
        done: "saved" or "loaded", for errors.

    Raises:
        TypeError: the state is not a dict.
        CheckpointError: the ``state_dict`` method of a value raised an error. The key is named.
    """
    _require_state_dict(state_dict)
    return {key: _state_of(key, value, done) for key, value in state_dict.items()}


def _state_of(key: str, value: Any, done: str) -> Any:
    try:
        return _dcp.state_of(value)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{key!r}: state_dict() of a {type(value).__name__} failed ({type(error).__name__}: {error}). Nothing was "
            f"{done}. Mend the object, or leave its key out"
        ) from error


def _require_state_dict(state_dict: object) -> None:
    """Refuse a state that is not a dict, such as a module.

    Raises:
        TypeError: naming what was passed, and what to pass.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"a state is a dict, not a {type(state_dict).__name__}. Nothing was done. Pass a dict with the part under "
            'a name, such as {"model": model.state_dict()}, or {"model": model}'
        )


def _load_unreplaced(
    load_once: Callable[[SPMDLoadPlanner], None],
    new_planner: Callable[[], SPMDLoadPlanner],
    reader: dcp.StorageReader,
) -> tuple[SPMDLoadPlanner, int]:
    """Load, and begin again if another save replaced the checkpoint while it was read.

    Returns:
        The planner of the load that succeeded, and how often it began again.
    """
    # A pinned reader belongs to ``restore``, which loads in several steps and begins all of them again.
    most = 0 if isinstance(reader, ShardReader) and reader.is_pinned else RESTARTS
    restarts = 0
    while True:
        planner = new_planner()
        try:
            load_once(planner)
            return planner, restarts
        except BaseException as error:
            planner.undo()  # another rank may have failed after this one had inserted everything
            # All ranks get the same error, so all of them begin again.
            if not isinstance(error, ReplacedCheckpointError) or restarts == most:
                raise
            logger.warning("%s", error)
            if isinstance(reader, ShardReader):
                reader.disconnect()
            reader.reset()
            restarts += 1


def _report(planner: SPMDLoadPlanner, reader: dcp.StorageReader, start: float, restarts: int) -> LoadReport:
    """Return the report of a load that began at ``start``, in seconds of ``time.perf_counter``."""
    total = time.perf_counter() - start
    plan = planner.planned_at - start
    stats = getattr(reader, "stats", None)
    return LoadReport(
        outcomes=planner.outcomes,
        bytes_needed=stats.bytes_needed if isinstance(stats, ReadStats) else None,
        bytes_read=stats.bytes_read if isinstance(stats, ReadStats) else None,
        bytes_received=stats.bytes_received if isinstance(stats, ReadStats) else None,
        requests=stats.requests if isinstance(stats, ReadStats) else None,
        plan_seconds=plan,
        read_seconds=total - plan - planner.put_seconds,
        put_seconds=planner.put_seconds,
        restarts=restarts,
    )


@contextmanager
def _abandoned_on_error(writer: dcp.StorageWriter) -> Iterator[None]:
    """Tell a ``ShardWriter`` that its save has failed, which DCP does not do."""
    try:
        yield
    except BaseException as error:
        if isinstance(writer, ShardWriter):
            writer.abandon(hurried=is_interrupt(error))
        raise


@contextmanager
def _failing_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let the save that begins after the block fail on all ranks if the block raises an error on this rank.

    Args:
        group: the ranks that save together; None for one process alone.

    Raises:
        CheckpointException: the block failed, and there are several ranks.
    """
    try:
        yield
    except BaseException as error:
        if group is not None:
            _dcp.fail_to_save(error, group)
        raise


@contextmanager
def readable_errors(processes: Processes, doing: str, done: str) -> Iterator[None]:
    """Turn DCP's and torch.distributed's errors in the block into this package's errors.

    ``except Exception`` does not catch DCP's ``CheckpointException``.

    Args:
        processes: the ranks that take part.
        doing: the operation and its path, the same on all ranks.
        done: "saved" or "loaded".
    """
    with processes.worded(doing, only_collectives=False), warnings.catch_warnings():
        # A warning from inside DCP, which users cannot change anything about.
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        try:
            yield
        except CheckpointException as error:
            cause = _dcp.cause(error, done, several=not processes.alone)
            raise cause from cause.__cause__ or error

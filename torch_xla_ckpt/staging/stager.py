"""SPMDStager: copies states, and saves the copies in a thread while training goes on."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.device import access_of
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.reports import LOCK, Timeline
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.staging import dcp_async
from torch_xla_ckpt.staging.capture import Capture, Choice, Mode
from torch_xla_ckpt.staging.closing import ClosesOnExit
from torch_xla_ckpt.staging.peers import Peers, joined
from torch_xla_ckpt.staging.save import Save, unread_error
from torch_xla_ckpt.staging.upload import AsyncSave, Upload
from torch_xla_ckpt.staging.worker import Worker, close_at_exit, forget
from torch_xla_ckpt.storage import Location, PathLike

logger = logging.getLogger(__name__)

_AnySave = TypeVar("_AnySave", bound=Save)


class SPMDStager(ClosesOnExit):
    """Copies states so that training can go on while they are saved.

    Pass it to ``torch_xla_ckpt.async_save``, or to ``dcp.async_save`` as ``async_stager`` together with an
    ``SPMDSavePlanner``. Make one for the whole training loop, and close it at the end: it is a context manager. Calls
    from several threads follow one another. With several ranks, use it from one thread only: all ranks must make their
    calls in the same order.

    Args:
        mode: where tensors on devices are copied. Default: "auto".

            - "device": to the same devices. The call takes milliseconds, and a copy takes as much device memory as the
              state. Shards are fetched to the host as the storage writes them.
            - "host": to host memory, before the call returns. The call takes as long as fetching.
            - "auto": "device" if the devices have room for a copy, else "host".
        device_memory_limit: bytes that copies may take on each device. Default: None, no limit. In mode "device",
            tensors that do not fit are copied to the host. In mode "auto", the limit is used as the free device memory,
            which torch_xla does not report under SPMD. Without a limit, "auto" reads the available host memory for
            virtual devices, and warns once for other devices.
        part_bytes: bytes of a tensor that are fetched at a time. Default: 16 MiB. Fetching a part holds Python's
            interpreter lock for up to half of its time, and the training loop cannot run Python meanwhile.
        reuse_buffers: whether to keep the memory of a copy in host memory or on virtual devices for the next copy.
            Default: True. The first use of fresh memory takes as long as the copy. The memory stays allocated between
            saves.
        max_pending: number of saves that may be under way. Default: 1. A further save waits until one has ended.
        process_group: the ranks that save together. Default: None, the default group. The first call creates a gloo
            group of these ranks for async saves.
        timeout: longest time that a rank waits for another one in an async save. Default: 30 minutes. One rank may be
            ahead of another by this time, because its storage is faster for example.
        access: a function that returns the ``TensorAccess`` to read a tensor with; see ``SPMDSavePlanner``.

    Raises:
        ValueError: an option has an impossible value.
    """

    # DCP's interface of stagers: ``stage`` leaves nothing to wait for.
    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def __init__(
        self,
        mode: Mode = "auto",
        *,
        device_memory_limit: int | None = None,
        part_bytes: int = 16 << 20,
        reuse_buffers: bool = True,
        max_pending: int = 1,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta = timedelta(minutes=30),
        access: Callable[[torch.Tensor], TensorAccess] = access_of,
    ):
        if mode not in ("auto", "device", "host"):
            raise ValueError(f'mode must be "auto", "device" or "host", not {mode!r}')
        if part_bytes <= 0 or max_pending <= 0:
            raise ValueError("part_bytes and max_pending must be positive")
        if device_memory_limit is not None and device_memory_limit < 0:
            raise ValueError("device_memory_limit must not be negative")
        self._capture = Capture(mode, device_memory_limit, part_bytes, reuse_buffers, access)
        self._max_pending = max_pending
        self._process_group = process_group
        self._timeout = timeout
        self._peers: Peers | None = None
        self._saves: list[Save] = []  # under way, or ended with an error that may have to be raised
        self._choice: Choice | None = None
        self._timeline = Timeline()
        self._is_closed = False
        self._owner = forks.Owner()
        self._calls = threading.RLock()  # held by the call that begins a save; reentrant for signal handlers
        self._worker = Worker()
        weakref.finalize(self, self._worker.stop).atexit = False
        close_at_exit(self)

    @property
    def choice(self) -> Choice | None:
        """How the last state was copied, and the reason; None before the first call."""
        return self._choice

    @property
    def timeline(self) -> Timeline:
        """What the threads of the last save have done so far."""
        return self._timeline

    @property
    def is_here(self) -> bool:
        """Whether the stager belongs to this process; False in a forked child."""
        return self._owner.is_here

    def run(
        self,
        state: Callable[[], dict[str, Any]],
        write: Callable[[dict[str, Any], dist.ProcessGroup | None, Timeline], Metadata],
        path: PathLike | Location | None,
        *,
        raises_earlier: bool = True,
    ) -> AsyncSave:
        """Copy a state now, and write the copy in the stager's thread.

        All ranks of the stager must call this at the same point. An error of one rank leaves the ranks in step: the
        save begins on all ranks, and fails on all of them with the name of the rank.

        Args:
            state: a function that returns the state. Its error is raised here, and fails the save on all ranks.
            write: a function that saves the copied state, called in another thread. Its further arguments are the
                group to coordinate through (None for one process alone) and the timeline to record in.
            path: the checkpoint's folder; None if the storage does not tell it.
            raises_earlier: whether to raise the error of an earlier save that nobody has read. One process raises it
                instead of saving. With several ranks, this save has begun when the error is raised, because the other
                ranks may have read the error, and begin to save. False: the caller calls ``raise_failed`` later.
                Default: True.

        Raises:
            CheckpointError: the state cannot be copied; or an earlier save failed, and nobody has read its error.
        """
        self._require_own()
        with self._calls:
            with self.preparing():
                location = None if path is None else Location.of(path)
            doing = "beginning an async save" if path is None else f"beginning an async save to {path}"
            interrupt = self._prepare(doing, raises_earlier=raises_earlier)
            save = self._add(Save(self._last_save, self._peers))
            copied = self._copied(save, state if interrupt is None else _raising(interrupt))
            upload = Upload()
            staging: Future[None] = Future()
            staging.set_result(None)
            timeline = self._timeline
            self._start(save, upload, location, lambda group: write(copied, group, timeline))
            if raises_earlier:
                self._raise_earlier(save)
            assert self._choice is not None
            return AsyncSave(staging, upload, self._choice, timeline)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Prepare a call of ``run`` in the block. If the block fails on one rank, the save fails on all ranks.

        Raises:
            Exception: the error of the block, unchanged. The other ranks get it from the futures of their saves.
        """
        try:
            yield
        except Exception as error:
            if self.is_here and not self._is_closed and not self._is_alone:
                failing = _raising(error)
                self.run(failing, failing, None, raises_earlier=False)
            raise

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Copy a state; ``dcp.async_save`` calls this, and then runs the save in a thread of its own.

        Returns:
            A future that holds the copy, for ``SPMDSavePlanner``. It is done: the state may change.

        Raises:
            CheckpointError: the state cannot be copied; or an earlier save failed, and nobody has read its error. With
                several ranks, ``dcp.async_save`` raises the error of an earlier save after it has begun its own.
        """
        self._require_own()
        with self._calls:
            call = dcp_async.call_under_way()
            interrupt = self._prepare("beginning dcp.async_save", is_alone=call.is_alone)
            save = self._add(dcp_async.StagedSave(self._last_save, None if call.is_alone else self._peers, call.group))
            copied = self._copied(save, (lambda: state_dict) if interrupt is None else _raising(interrupt))
            return dcp_async.StagedState(save, copied, lambda: self._raise_earlier(save))

    def synchronize_staging(self) -> None:
        """Do nothing: ``stage`` returns when the state may change. A part of DCP's interface."""

    def wait(self) -> None:
        """Wait until all saves have ended.

        Raises:
            CheckpointError: a save failed, and nobody has read its error; or this is a forked child.
        """
        self._require_own()
        for save in list(self._saves):
            save.wait()
        self.raise_failed()

    def close(self, *, cancel: bool = False) -> None:
        """Wait for the saves that are under way, and release all memory.

        In a forked child this does nothing, because the saves belong to the parent.

        Args:
            cancel: give up the saves instead of waiting. Default: False. The previous checkpoint at their path stays. A
                save that is about to commit may still commit.

        Raises:
            CheckpointError: a save failed, and nobody has read its error.
        """
        if self._is_closed or not self._owner.is_here:
            return
        for save in self._saves:
            if cancel or not save.is_handed_over:
                save.cancel()
        try:
            for save in self._saves:
                save.wait()
        except BaseException:  # an interrupt while waiting gives up the saves, so that the program can end
            for save in self._saves:
                save.cancel()
            raise
        self._is_closed = True
        forget(self)
        self._worker.stop()
        self._capture.release()
        if self._peers is not None:
            self._peers.close()
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raise the errors of saves that have ended, once, unless somebody has read them.

        Raises:
            CheckpointError: a save failed; the cause is the error of the save.
        """
        self._require_own()
        with self._calls:
            error = unread_error(self._ended())
        if error is not None:
            raise error

    def _raise_earlier(self, save: Save) -> None:
        """Raise unread errors of saves before ``save``, which has begun with other ranks.

        Raises:
            CheckpointError: an earlier save failed.
        """
        if save.group is None:
            return
        with self._calls:
            error = unread_error(self._ended(but=save))
        if error is not None:
            raise CheckpointError(f"{error}. The save of this call has begun") from error.__cause__

    def _ended(self, but: Save | None = None) -> list[Save]:
        """Remove the saves that have ended from the list, except ``but``, and return them."""
        ended = [save for save in self._saves if save.has_ended and save is not but]
        self._saves = [save for save in self._saves if save not in ended]
        return ended

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank takes part in the next save."""
        return Processes(None).alone or (self._peers is None and Processes(self._process_group).size == 1)

    @property
    def _last_save(self) -> Save | None:
        return self._saves[-1] if self._saves else None

    def _add(self, save: _AnySave) -> _AnySave:
        self._saves.append(save)
        return save

    def _prepare(self, doing: str, *, is_alone: bool = False, raises_earlier: bool = True) -> BaseException | None:
        """Wait until another save may begin, and create the group of the ranks.

        Args:
            doing: the operation, for error messages; the same on all ranks.
            is_alone: whether the caller wants no other rank to take part. Default: False.
            raises_earlier: see ``run``.

        Returns:
            An interrupt of the wait, to be raised after the save has begun, because other ranks have begun it; or None.
        """
        if self._is_closed:
            raise CheckpointError("the stager is closed; create another one")
        for save in self._saves:
            if not save.is_handed_over:  # an interrupt ended the call that began this save
                save.cancel()
        raises_now = raises_earlier and (is_alone or self._is_alone)
        if raises_now:
            self.raise_failed()
        self._timeline = Timeline()
        try:
            with self._timeline.span("wait for a slot"):
                self._wait_for_slot()
        except BaseException as interrupt:
            if is_alone or self._peers is None or not self._peers.is_usable:
                raise
            return interrupt
        if raises_now:
            self.raise_failed()
        if not is_alone:
            self._peers = joined(self._peers, self._process_group, self._timeout, doing)
        return None

    def _require_own(self) -> None:
        if not self._owner.is_here:
            raise CheckpointError(self._owner.refusal("stager"))

    def _wait_for_slot(self) -> None:
        while len(pending := [save for save in self._saves if not save.has_ended]) >= self._max_pending:
            logger.info(
                "a save waits for a free slot: %s of %s saves are under way (max_pending), the oldest to %s",
                len(pending),
                self._max_pending,
                pending[0].where,
            )
            pending[0].wait()

    def _copied(self, save: Save, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a copy of the state. If copying fails, the save fails on the other ranks too."""
        try:
            captured = self._capture.take(state(), save.check, self._timeline)
        except BaseException as error:
            if not self._owner.is_here:  # a child that was forked while copying: the save goes on in the parent
                raise
            failure = error  # ``error`` ends with this block, and the thread needs it later
            save.is_reported = False
            if save.group is None:
                save.end()
            else:
                self._start(save, Upload(), None, lambda group: _dcp.fail_to_save(failure, group))
            raise
        save.snapshots = captured.snapshots
        if self._choice is None or self._choice.mode != captured.choice.mode:
            logger.info("states are copied in mode %r: %s", captured.choice.mode, captured.choice.reason)
        self._choice = captured.choice
        return captured.state

    def _start(
        self,
        save: Save,
        upload: Upload,
        path: Location | None,
        write: Callable[[dist.ProcessGroup | None], Metadata | None],
    ) -> None:
        """Run a save in the stager's thread, after all earlier saves."""
        timeline = self._timeline
        save.hand_over(upload, path)

        def work() -> None:
            try:
                with timeline.span(LOCK):
                    save.wait_for_turn()
                with save.requests.applied():
                    metadata = write(save.group)
            except BaseException as error:
                if not self._owner.is_here:  # a child that was forked by this thread: the save is the parent's
                    raise
                upload.set_exception(error)
            else:
                upload.set_result(metadata)

        upload.set_running_or_notify_cancel()
        self._worker.submit(work)


def _raising(error: BaseException) -> Callable[..., NoReturn]:
    """Return a function that raises an error."""

    def fail(*_: object) -> NoReturn:
        raise error

    return fail

"""SPMDStager: saving that does not stop training."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.device import access_of
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.reports import Timeline
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.staging.capture import Capture, Choice, Mode
from torch_xla_ckpt.staging.peers import Peers
from torch_xla_ckpt.staging.upload import Save, Staged, Upload
from torch_xla_ckpt.storage import Location, PathLike

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AsyncSave:
    """A save that goes on in the background.

    Args:
        staging_completion: resolves when the state may change; it has when you get this.
        upload_completion: resolves to the checkpoint's metadata when it is committed, or raises what went wrong.
        choice: how the tensors on devices were copied, and why so.
        timeline: what was done when, until now.
    """

    staging_completion: Future[None]
    upload_completion: Future[Metadata]
    choice: Choice
    timeline: Timeline

    def result(self, timeout: float | None = None) -> Metadata:
        """Wait for the commit.

        Raises:
            TimeoutError: it takes longer than ``timeout`` seconds.
            CheckpointError: the save failed.
        """
        return self.upload_completion.result(timeout)

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self.upload_completion.done()


class SPMDStager:
    """Copies states so that training can go on while they are saved.

    Give it to ``torch_xla_ckpt.async_save``, or to ``dcp.async_save`` as ``async_stager`` together with an
    ``SPMDSavePlanner``. It lives as long as the training loop: a context manager, or to be closed. Not for use from
    several threads.

    Args:
        mode: where tensors on devices are copied to. "device": to the same devices, which takes milliseconds and as
            much device memory as the state; shards are fetched in the background as the storage writes them. "host":
            to host memory before the call returns, which takes as long as fetching. "auto": "device" if there is
            room, else "host".
        device_memory_limit: bytes that copies may take on each device. In mode "device" what does not fit goes
            through the host. In mode "auto" it stands for the free memory, which torch_xla does not report under SPMD.
            Without it, "auto" uses the host's available memory for virtual devices, and warns once for others.
        part_bytes: a tensor is fetched in parts of about as many bytes. Python's lock is held for up to a half of the
            time that fetching a part takes, and the training loop cannot go on meanwhile.
        reuse_buffers: keep the host memory of a copy, that of virtual devices too, for the next copy: memory that was
            never used before costs as much time as the copy. The memory stays the program's between saves.
        max_pending: saves that may be under way. Another one waits for a free slot.
        process_group: the processes that save together; default: all. The background has a gloo group of its own for
            them, created in the first call.
        timeout: how long processes wait for each other in the background. It must be more than one process can be
            ahead of another, for example when its storage is faster.
        access: how tensors are read; see ``SPMDSavePlanner``.

    Raises:
        ValueError: an option makes no sense.
    """

    # DCP's protocol: nothing is left to wait for after ``stage``.
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
        self._saves: list[Save] = []  # that are under way, or whose end nobody has asked for
        self._choice: Choice | None = None
        self._timeline = Timeline()
        self._closed = False
        self._owner = forks.Owner()
        self._worker = _Worker()
        weakref.finalize(self, self._worker.stop).atexit = False
        _close_at_exit(self)

    @property
    def choice(self) -> Choice | None:
        """How the last state was copied, and why so."""
        return self._choice

    @property
    def timeline(self) -> Timeline:
        """What was done when by the save that began last."""
        return self._timeline

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """Copy a state for ``dcp.async_save``, which calls this.

        Returns:
            The copy, for ``SPMDSavePlanner``. The future is done: the state may change.

        Raises:
            CheckpointError: the state cannot be copied; or an earlier save failed, and nobody has asked how it ended.
        """
        save = self._begin()
        state = self._copied(save, lambda: state_dict)
        return Staged(save, state)

    def run(
        self,
        state: Callable[[], dict[str, Any]],
        write: Callable[[dict[str, Any], dist.ProcessGroup | None, Timeline], Metadata],
        path: PathLike | Location | None,
    ) -> AsyncSave:
        """Copy a state, and write it in the background.

        Args:
            state: makes the state.
            write: saves a copied state through a process group, or alone without one; called in another thread.
            path: what ``write`` writes to.

        Raises:
            CheckpointError: as ``stage``.
        """
        save = self._begin("an async save" if path is None else f"an async save to {path}")
        copied = self._copied(save, state)
        upload = Upload()
        staging: Future[None] = Future()
        staging.set_result(None)
        timeline = self._timeline
        self._start(save, upload, path, lambda group: write(copied, group, timeline))
        assert self._choice is not None
        return AsyncSave(staging, upload, self._choice, timeline)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: ``stage`` returns when the state may change."""

    def wait(self) -> None:
        """Wait until all saves have ended.

        Raises:
            CheckpointError: one failed, and nobody has asked how it ended; or this is a forked child.
        """
        self._require_own()
        for save in list(self._saves):
            save.wait()
        self.raise_failed()

    def close(self, *, cancel: bool = False) -> None:
        """Wait for the saves that are under way, and let go of everything.

        In a forked child this does nothing: the saves are the parent's.

        Args:
            cancel: give them up instead. What they were about to replace stays; one that was about to be committed
                may still be.

        Raises:
            CheckpointError: a save failed, and nobody has asked how it ended.
        """
        if self._closed or not self._owner.is_here:
            return
        for save in self._saves:
            if cancel or not save.attached:
                save.cancel()
        try:
            for save in self._saves:
                save.wait()
        except BaseException:  # an interrupt while waiting: whoever is in a hurry loses the save, not the program
            for save in self._saves:
                save.cancel()
            raise
        self._closed = True
        _open.discard(self)
        self._worker.stop()
        self._capture.release()
        if self._peers is not None:
            self._peers.close()
        self.raise_failed()

    def __enter__(self) -> SPMDStager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            logger.error("a save in the background failed too: %s", failed)  # the block's own error goes first

    def _begin(self, what: str = "dcp.async_save") -> Save:
        """Wait for a slot, and take it.

        Args:
            what: the save, for error messages.
        """
        self._require_own()
        if self._closed:
            raise CheckpointError("the stager is closed; create another one")
        for save in self._saves:
            if not save.attached:
                save.cancel()
        self.raise_failed()
        self._timeline = Timeline()
        with self._timeline.span("wait for a slot"):
            self._wait_for_slot()
        self.raise_failed()
        self._join_peers(f"beginning {what}")
        save = Save(self._saves[-1] if self._saves else None, self._worded, self._use_own_group, self._peers)
        self._saves.append(save)
        return save

    def _require_own(self) -> None:
        if not self._owner.is_here:
            raise CheckpointError(self._owner.refusal("stager"))

    def _wait_for_slot(self) -> None:
        while len(pending := [save for save in self._saves if not save.ended]) >= self._max_pending:
            logger.info(
                "a save waits for a free slot: %s of %s saves are under way (max_pending), the oldest to %s",
                *(len(pending), self._max_pending, pending[0].where),
            )
            pending[0].wait()

    def _join_peers(self, doing: str) -> None:
        """Create the group, at a point of the program that all processes pass in the same order.

        Raises:
            CheckpointError: a process did not come in time.
        """
        if self._peers is not None and self._peers.destroyed and not dist.is_initialized():
            raise CheckpointError(
                "the process group that this stager saves with was destroyed. Initialise torch.distributed again, or "
                "create another stager to save from this process alone"
            )
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size(self._process_group) > 1
        if several and (self._peers is None or self._peers.failed or self._peers.destroyed):
            if self._peers is not None:
                self._peers.close()
            self._peers = Peers(self._process_group, self._timeout, doing)

    def _use_own_group(self) -> None:
        if self._peers is not None:
            _dcp.use_group(self._peers.group, self._peers.instead_of)

    def _copied(self, save: Save, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state's copy. If that fails, the other processes are told, who are about to wait for this one."""
        try:
            captured = self._capture.take(state(), save.check, self._timeline)
        except BaseException as error:
            if not self._owner.is_here:  # a child that was forked while copying: the save goes on in the parent
                raise
            failure = error  # for longer than this block
            save.reported = False
            if self._peers is None:
                save.end()
            else:
                self._start(save, Upload(), None, lambda group: _dcp.fail_to_save(failure, group))
            raise
        save.snapshots = captured.snapshots
        if self._choice is None or self._choice.mode != captured.choice.mode:
            logger.info("states are copied in mode %r: %s", *captured.choice)
        self._choice = captured.choice
        return captured.state

    def _start(
        self,
        save: Save,
        upload: Upload,
        path: PathLike | Location | None,
        write: Callable[[dist.ProcessGroup | None], Metadata | None],
    ) -> None:
        """Run a save in the stager's thread, when it is its turn."""
        group = None if self._peers is None else self._peers.group
        save.attach(upload, path)

        def work() -> None:
            try:
                save.wait_for_turn()
                metadata = write(group)
            except BaseException as error:
                if not self._owner.is_here:  # a child that was forked by this thread: the save is the parent's
                    raise
                upload.set_exception(error)
            else:
                upload.set_result(metadata)

        upload.set_running_or_notify_cancel()
        self._worker.submit(work)

    def _worded(self, save: Save, error: BaseException) -> BaseException:
        """An error of a save, as one of ours."""
        where = save.where or "its storage"
        if isinstance(error, CheckpointException):
            worded = _dcp.cause(error, "saved", several=save.peers is not None)
        elif isinstance(error, CheckpointError) or save.peers is None:
            worded = error
        else:  # what fails on one process is gathered by DCP; only what gathers it can fail like this
            blame = save.peers.blame(save.number)
            worded = CheckpointError(
                f"the save to {where} broke off while the processes coordinated it: {blame.what} "
                f"({type(error).__name__}: {error}). {where} holds what it held before, or all of the new checkpoint. "
                + blame.remedy
            )
        if worded is not error:
            worded.__cause__ = error
        if not save.cancelled and save.reported:
            logger.warning("the save to %s failed in the background: %s", where, worded)
        return worded

    def raise_failed(self) -> None:
        """Raise, once, what a save that has ended failed with, if nobody has asked.

        Raises:
            CheckpointError: with that as its cause.
        """
        self._require_own()
        ended = [save for save in self._saves if save.ended]
        self._saves = [save for save in self._saves if not save.ended]
        wanted = [save.upload for save in ended if save.upload is not None and save.reported and not save.cancelled]
        errors = [upload.error() for upload in wanted if not upload.asked]
        failed = [error for error in errors if error is not None]
        if failed:
            more = f" (and {len(failed) - 1} more, which the log has)" if len(failed) > 1 else ""
            raise CheckpointError(f"an earlier save in the background failed: {failed[0]}{more}") from failed[0]


class _Worker:
    """A thread that runs one job after the other. It is kept, because starting one waits for a free processor."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = False

    def submit(self, job: Callable[[], None]) -> None:
        if not self._started:
            self._started = True
            threading.Thread(target=_work, args=(self._jobs,), name="SPMDStager").start()
        self._jobs.put(job)

    def stop(self) -> None:
        """Let the thread end when it has done what was submitted."""
        self._jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # while this waits for the next one, it must not hold the last one's state


_open: weakref.WeakSet[SPMDStager] = weakref.WeakSet()
_registered = False


def _close_at_exit(stager: SPMDStager) -> None:
    """Let the interpreter wait for a stager's saves before it takes down what they need.

    Threads are waited for anyway, but only when executors take no more work, which the network libraries need.
    ``atexit`` is later still.
    """
    global _registered
    _open.add(stager)
    if not _registered:
        _registered = True
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _close_all() -> None:
    for stager in list(_open):
        try:
            stager.close()
        except CheckpointError as error:
            logger.error("%s", error)

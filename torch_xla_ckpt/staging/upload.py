"""One save in the background: how it begins, waits for its turn, is given up, and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.device import Snapshot
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.staging.peers import Peers
from torch_xla_ckpt.storage import Location, PathLike, path_lock


class Upload(Future):  # type: ignore[type-arg]
    """The future of a background save: resolves when the checkpoint is committed.

    It knows whether somebody has asked how the save ended, and words what DCP fails with.
    """

    save: Save | None = None
    asked = False

    def done(self) -> bool:
        """Whether the save has ended, well or not; also true in a forked child, where it never would."""
        return super().done() or self._foreign()

    def _foreign(self) -> bool:
        return self.save is not None and not self.save.owner.is_here

    def _require_own(self) -> None:
        """Refuse to wait in a forked child.

        Raises:
            CheckpointError: the save runs in the process that this one was forked from.
        """
        if self._foreign() and not super().done():
            assert self.save is not None
            raise CheckpointError(self.save.owner.refusal("async save"))

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._require_own()
        try:
            return super().exception(timeout)
        finally:
            self.asked = self.asked or self.done()

    def renew(self) -> None:
        """In a forked child: no other thread holds the future's lock."""
        self._condition = threading.Condition()

    def error(self) -> BaseException | None:
        """What a save that has ended failed with, without counting as somebody who asked."""
        return super().exception(0)

    def set_exception(self, exception: BaseException | None) -> None:
        if exception is not None and self.save is not None:
            exception = self.save.worded(exception)
        super().set_exception(exception)


class Staged(Future):  # type: ignore[type-arg]
    """The future of a staged state, as ``dcp.async_save`` takes it from a stager.

    DCP tells a stager neither where its save goes nor how it ends. But it looks at this future twice: in the caller's
    thread, once the save has been handed over to another, and in that thread before it begins.
    """

    def __init__(self, save: Save, state: dict[str, Any]):
        super().__init__()
        self._save = save
        self.set_result(state)

    def done(self) -> bool:
        if not self._save.attached:
            found = _dcp.async_save_under_way()
            if found is not None:
                upload, path = found
                self._save.attach(_adopted(upload), path)
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        if threading.current_thread() is not self._save.caller:
            self._save.wait_for_turn()
        return super().result(timeout)


def _adopted(upload: Future[Any]) -> Upload:
    """DCP's future, as one of ours: it has been handed out already, so it cannot be replaced."""
    upload.__class__ = Upload
    assert isinstance(upload, Upload)
    return upload


class Save:
    """A save in the background, from its call to its end.

    Args:
        before: the stager's save that must have ended before this one is written.
        worded: says what an error means that the save fails with.
        begin: called once in the thread that writes, when the planner looks at the state.
        peers: the processes that save together; None for one process alone.

    Attributes:
        owner: the process that it runs in.
        number: counts the saves of ``peers``.
        reported: whether its failure is to be raised later if nobody asks.
    """

    def __init__(
        self,
        before: Save | None,
        worded: Callable[[Save, BaseException], BaseException],
        begin: Callable[[], None],
        peers: Peers | None = None,
    ):
        self.owner = forks.Owner()
        self.caller = threading.current_thread()
        self.upload: Upload | None = None
        self.snapshots: Sequence[Snapshot] = ()
        self.reported = True
        self.cancelled = False
        self.peers = peers
        self.number = 0 if peers is None else peers.begin()
        self._before = before
        self._worded = worded
        self._begin: Callable[[], None] | None = begin
        self._turn = path_lock.Turn()
        self._attached = threading.Event()
        self._ended = threading.Event()

    @property
    def where(self) -> str | None:
        """What it writes to."""
        return self._turn.where

    @property
    def attached(self) -> bool:
        """Whether it is known where it writes and how it will end."""
        return self._attached.is_set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def attach(self, upload: Upload, path: PathLike | Location | None) -> None:
        """Say which future tells how the save ends, and where it writes."""
        self.upload = upload
        self._turn.where = None if path is None else Location.of(path).identity
        if self.peers is not None:
            self.peers.goes_to(self.number, self.where)
        upload.save = self
        forks.renew_in_child(upload, Upload.renew)
        upload.add_done_callback(lambda _: self.end())
        self._attached.set()

    def wait_for_turn(self) -> None:
        """In the thread that writes: wait until it may.

        One that was given up goes on to fail in ``check``, where DCP tells the other processes.
        """
        self._attached.wait()
        if self._before is not None:
            self._before.wait()
            self._before = None  # or every save would hold all that went before it
        self._turn.take()

    def check(self) -> None:
        """Called wherever the save uses its snapshots.

        Raises:
            CheckpointError: the save has been given up.
        """
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()
        if self.cancelled:
            raise CheckpointError("the save was cancelled; a checkpoint that was there before is untouched")

    def worded(self, error: BaseException) -> BaseException:
        return self._worded(self, error)

    def cancel(self) -> None:
        """Let the save fail at the next opportunity."""
        self.cancelled = True
        if not self.attached:  # DCP was interrupted before it handed the save to its thread: nobody else will end it
            self._attached.set()
            self.end()

    def end(self) -> None:
        """Nothing is written any more."""
        for snapshot in self.snapshots:
            snapshot.release()
        self.snapshots = ()
        self._turn.end()
        self._ended.set()

    def wait(self) -> None:
        """Wait for the end."""
        self._ended.wait()

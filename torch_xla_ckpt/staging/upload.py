"""What the caller of an async save gets: the future of the commit, and the handle that holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.reports import Timeline
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.staging.capture import Choice


class Upload(Future):  # type: ignore[type-arg]
    """The future of an async save's commit.

    Resolves to the checkpoint's metadata, or raises the error of the save.

    Attributes:
        was_read: whether the result or the error was read after the save had ended.
    """

    # Defaults on the class, because ``dcp_async`` turns a future of DCP's into an ``Upload`` without calling __init__.
    _owner: forks.Owner | None = None
    _explain: Callable[[BaseException], BaseException] | None = None
    was_read = False

    def attach(self, owner: forks.Owner, explain: Callable[[BaseException], BaseException]) -> None:
        """Tell the future about its save.

        Args:
            owner: the process that runs the save.
            explain: turns an error of the save into the error to raise.
        """
        self._owner = owner
        self._explain = explain
        forks.renew_in_child(self, Upload._renew)

    def done(self) -> bool:
        """Whether the save has ended. Also true in a forked child, where the save never ends."""
        return super().done() or self._is_foreign()

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the save and return its error; None if it succeeded.

        Args:
            timeout: seconds to wait. None: no limit.

        Raises:
            TimeoutError: the save goes on for longer than ``timeout``.
            CheckpointError: this is a forked child, and the save runs in its parent.
        """
        if self._is_foreign() and not super().done():
            assert self._owner is not None
            raise CheckpointError(self._owner.refusal("async save"))
        try:
            return super().exception(timeout)
        finally:
            self.was_read = self.was_read or self.done()

    def error(self) -> BaseException | None:
        """Return the error of a save that has ended, without changing ``was_read``."""
        return super().exception(0)

    def set_exception(self, exception: BaseException | None) -> None:
        if exception is not None and self._explain is not None:
            exception = self._explain(exception)
        super().set_exception(exception)

    def _is_foreign(self) -> bool:
        return self._owner is not None and not self._owner.is_here

    def _renew(self) -> None:
        """In a forked child: replace the future's lock, which another thread may have held during the fork."""
        self._condition = threading.Condition()


@dataclass(frozen=True)
class AsyncSave:
    """An async save that is under way.

    Args:
        staging_completion: resolves when the state may change. It has resolved when ``async_save`` returns.
        upload_completion: resolves to the checkpoint's metadata when the save is committed, or raises its error.
        choice: how tensors on devices were copied, and the reason.
        timeline: what the save's threads have done so far.
    """

    staging_completion: Future[None]
    upload_completion: Future[Metadata]
    choice: Choice
    timeline: Timeline

    def result(self, timeout: float | None = None) -> Metadata:
        """Wait for the commit and return the checkpoint's metadata.

        Args:
            timeout: seconds to wait. None: no limit.

        Raises:
            TimeoutError: the save goes on for longer than ``timeout``.
            CheckpointError: the save failed.
        """
        return self.upload_completion.result(timeout)

    def done(self) -> bool:
        """Whether the save has ended, with a commit or with an error."""
        return self.upload_completion.done()

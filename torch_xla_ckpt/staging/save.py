"""One async save: it begins, waits until earlier saves have ended, may be cancelled, and ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.device import Snapshot
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.staging.peers import Peers
from torch_xla_ckpt.staging.upload import Upload
from torch_xla_ckpt.storage import Cancellation, Location, path_lock

logger = logging.getLogger(__name__)


class Save:
    """An async save, from its call to its end.

    Args:
        previous: the save of the same stager that must end before this one writes; None if there is none.
        peers: the ranks that save together; None for one process alone.

    Attributes:
        owner: the process that runs the save.
        peers: as above.
        number: the save's number among those of ``peers``, the same on all ranks; 0 without peers.
        upload: the future of the commit; None until ``hand_over``.
        snapshots: the copied tensors. They are released when the save ends.
        is_reported: whether the stager raises the save's error if nobody reads it from the future.
        is_cancelled: whether the save was given up.
        requests: gives up the requests of the thread that runs the save.
    """

    def __init__(self, previous: Save | None, peers: Peers | None):
        self.owner = forks.Owner()
        self.peers = peers
        self.number = 0 if peers is None else peers.begin()
        self.upload: Upload | None = None
        self.snapshots: Sequence[Snapshot] = ()
        self.is_reported = True
        self.is_cancelled = False
        self.requests = Cancellation()
        self._previous = previous
        self._turn = path_lock.Turn()
        self._handed_over = threading.Event()
        self._ended = threading.Event()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group that coordinates the save; None for one process alone."""
        return None if self.peers is None else self.peers.group

    @property
    def where(self) -> str | None:
        """The identity of the location that the save writes to; None if unknown."""
        return self._turn.where

    @property
    def is_handed_over(self) -> bool:
        """Whether the save was handed to the thread that runs it."""
        return self._handed_over.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the save writes no more."""
        return self._ended.is_set()

    def hand_over(self, upload: Upload, path: Location | None) -> None:
        """Record that a thread is about to run the save.

        Args:
            upload: the future that resolves when the save has ended.
            path: the checkpoint's folder; None if the storage does not tell it.
        """
        self.upload = upload
        self._turn.where = None if path is None else path.identity
        if self.peers is not None:
            self.peers.goes_to(self.number, self.where)
        upload.attach(self.owner, self.explained)
        upload.add_done_callback(lambda _: self.end())
        self._handed_over.set()

    def wait_for_turn(self) -> None:
        """Wait until the save may write; called in the thread that runs the save.

        A cancelled save returns from here too. It fails in ``check``, inside ``dcp.save``, which tells the other
        ranks.
        """
        self._handed_over.wait()
        if self._previous is not None:
            self._previous.wait()
            self._previous = None  # else every save would keep all earlier ones alive
        self._turn.take()

    def check(self) -> None:
        """Refuse to use the snapshots of a cancelled save. Each snapshot calls this before its data is used.

        Raises:
            CheckpointError: the save was cancelled.
        """
        if self.is_cancelled:
            raise CheckpointError("the save was cancelled; a checkpoint that was there before is untouched")

    def cancel(self) -> None:
        """Let the save fail at the next use of its snapshots, and give up its requests to a store."""
        self.is_cancelled = True
        self.requests.cancel()
        if not self.is_handed_over:  # an interrupt came before the hand-over, so no thread will ever end the save
            self._handed_over.set()
            self.end()

    def end(self) -> None:
        """Release the snapshots, and let the saves that wait for this one go on."""
        for snapshot in self.snapshots:
            snapshot.release()
        self.snapshots = ()
        self._turn.end()
        self._ended.set()

    def wait(self) -> None:
        """Wait until the save has ended."""
        self._ended.wait()

    def explained(self, error: BaseException) -> BaseException:
        """Return the error to raise for an error of this save, and log it."""
        where = self.where or "its storage"
        explained = error
        if isinstance(error, CheckpointException):
            explained = _dcp.cause(error, "saved", several=self.peers is not None, interrupts=False)
        elif self.peers is not None and not isinstance(error, CheckpointError):
            # DCP gathers the errors of all ranks. Any other error comes from the gathering itself.
            blame = self.peers.blame(self.number)
            explained = CheckpointError(
                f"the save to {where} failed while the ranks coordinated it: {blame.what} "
                f"({type(error).__name__}: {error}). {where} holds the previous checkpoint or all of the new one. "
                f"{blame.remedy}"
            )
        if explained is not error:
            explained.__cause__ = explained.__cause__ or error
        if not self.is_cancelled and self.is_reported:
            logger.warning("the async save to %s failed: %s", where, explained)
        return explained


def unread_error(ended: Sequence[Save]) -> CheckpointError | None:
    """Return an error that tells of failed saves whose errors nobody has read; None if there are none.

    Args:
        ended: saves that have ended.
    """
    uploads = [save.upload for save in ended if save.is_reported and not save.is_cancelled]
    errors = [upload.error() for upload in uploads if upload is not None and not upload.was_read]
    failed = [error for error in errors if error is not None]
    if not failed:
        return None
    more = f" (and {len(failed) - 1} more, which the log has)" if len(failed) > 1 else ""
    error = CheckpointError(f"an earlier async save failed: {failed[0]}{more}")
    error.__cause__ = failed[0]
    return error

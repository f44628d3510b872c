"""Support for plain ``dcp.async_save(..., async_stager=SPMDStager())``. Nothing else uses this file.

``xc.async_save`` tells the stager all that a save needs: the path, the function that writes, and the group that
coordinates. DCP tells a stager nothing of this. ``dcp.async_save`` calls ``stager.stage(state_dict)``, lets
``dcp.save`` run in a thread of its own, and returns the future of that thread. It has no hook for three things:

- *Where the save writes, and how it ends.* The stager must know both: the path, so that other saves to the same
  path wait; the end, so that copies are released and unread errors raised. DCP calls ``done()`` of the staged state's
  future right after it started its thread. ``StagedState.done`` finds DCP's local variables with the path and
  the thread's future in the calling frame.
- *When the save may begin.* Saves of a stager are written in order. DCP's thread reads the staged state first, so
  ``StagedState.result`` waits there until earlier saves have ended.
- *Which group coordinates.* By default, DCP's thread gathers and scatters through the default process group, in whose
  barriers the training loop waits. Ranks would then meet in another order in each thread, which hangs or mixes up their
  messages. The first use of a snapshot, in the planner's ``set_up_planner``, is before DCP's first collective.
  ``StagedSave.check`` finds DCP's wrapper of the group in the calling frames and gives it the stager's group.

This depends on the code of ``dcp.async_save`` and ``_DistWrapper``. The tests with ``way="dcp"`` fail if it changes.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future
from types import FrameType
from typing import Any

import torch.distributed as dist

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.staging.peers import Peers
from torch_xla_ckpt.staging.save import Save
from torch_xla_ckpt.staging.upload import Upload


class StagedSave(Save):
    """A save that ``dcp.async_save`` runs.

    Attributes:
        caller: the thread that called ``dcp.async_save``.
    """

    def __init__(self, previous: Save | None, peers: Peers | None):
        super().__init__(previous, peers)
        self.caller = threading.current_thread()
        self._is_steered = False

    def check(self) -> None:
        if not self._is_steered:
            self._is_steered = True
            if self.peers is not None:
                _coordinate_through(self.peers)
        super().check()


class StagedState(Future):  # type: ignore[type-arg]
    """The future that ``stage`` returns to ``dcp.async_save``; it holds the copied state from the start."""

    def __init__(self, save: StagedSave, state: dict[str, Any]):
        super().__init__()
        self._save = save
        self.set_result(state)

    def done(self) -> bool:
        """Return True. Called from ``dcp.async_save``, also learn the save's path and its future."""
        if not self._save.is_handed_over:
            call = _calling_async_save()
            if call is not None:
                upload, path = call
                self._save.hand_over(_as_upload(upload), path)
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Return the copied state. In DCP's thread, wait until earlier saves have ended."""
        if threading.current_thread() is not self._save.caller:
            self._save.wait_for_turn()
        return super().result(timeout)


def _calling_async_save() -> tuple[Future[Any], str | os.PathLike[str] | None] | None:
    """Return the future and the path of the ``dcp.async_save`` that calls ``done``; None if another function does."""
    frame = sys._getframe(2)
    if frame.f_code.co_name != "async_save" or "upload_future" not in frame.f_locals:
        return None
    return frame.f_locals["upload_future"], getattr(frame.f_locals["storage_writer"], "checkpoint_id", None)


def _as_upload(future: Future[Any]) -> Upload:
    """Change the class of DCP's future. DCP has bound it to the thread and returns it, so it cannot be replaced."""
    future.__class__ = Upload
    assert isinstance(future, Upload)
    return future


def _coordinate_through(peers: Peers) -> None:
    """Let the ``dcp.save`` that is calling coordinate through the group of ``peers``.

    A group that the caller passed to ``dcp.async_save`` stays in use, unless it is the stager's ``process_group``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        wrapper = frame.f_locals.get("self") if frame.f_code.co_name in ("reduce_scatter", "all_reduce") else None
        if isinstance(wrapper, _dcp.DistWrapper):
            if wrapper.use_dist and any(wrapper.group is other for other in peers.instead_of):
                wrapper.group = peers.group
                wrapper.global_coordinator_rank = dist.get_global_rank(peers.group, wrapper.coordinator_rank)
            return
        frame = frame.f_back

"""Support for plain ``dcp.async_save(..., async_stager=SPMDStager())``. Nothing else uses this file.

``xc.async_save`` tells the stager all that a save needs: the path, the function that writes, and the group that
coordinates. DCP tells a stager nothing of this. ``dcp.async_save`` calls ``stager.stage(state_dict)``, lets
``dcp.save`` run in a thread of its own, and returns the future of that thread. It has no hook for four things:

- *Where the save writes, and how it ends.* The stager must know both: the path, so that other saves to the same
  path wait; the end, so that copies are released and unread errors raised. DCP calls ``done()`` of the staged state's
  future right after it started its thread. ``StagedState.done`` finds DCP's local variables with the path and
  the thread's future in the calling frame.
- *When the save may begin.* Saves of a stager are written in order. DCP's thread reads the staged state first, so
  ``StagedState.result`` waits there until earlier saves have ended.
- *Which group coordinates.* By default, DCP's thread gathers and scatters through the default process group, in whose
  barriers the training loop waits. Ranks would then meet in another order in each thread, which hangs or mixes up their
  messages. The first use of a snapshot, in the planner's ``set_up_planner``, is before DCP's first collective.
  ``StagedSave.check`` finds DCP's wrapper of the group in the calling frames and gives it the stager's group. If this
  rank cannot copy its state, the stager must fail the save in the group of the call. ``call_under_way`` finds it.
- *Errors of earlier saves.* ``stage`` must not raise them on one of several ranks, because DCP would not begin the save
  there. ``StagedState.done`` raises them, when DCP has begun the save.

This depends on the code of ``dcp.async_save`` and ``_DistWrapper``. The tests with ``way="dcp"`` fail if it changes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.staging.peers import Peers
from torch_xla_ckpt.staging.save import Save
from torch_xla_ckpt.staging.upload import Upload
from torch_xla_ckpt.storage import Location


class Call(NamedTuple):
    """What ``dcp.async_save`` was called with.

    Args:
        group: its ``process_group``; None for the default group.
        is_alone: its ``no_dist``.
    """

    group: dist.ProcessGroup | None = None
    is_alone: bool = False


def call_under_way() -> Call:
    """Return the arguments of the ``dcp.async_save`` that calls; the defaults if another function does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "async_save" and "async_stager" in frame.f_locals:
            return Call(frame.f_locals.get("process_group"), bool(frame.f_locals.get("no_dist")))
        frame = frame.f_back
    return Call()


class StagedSave(Save):
    """A save that ``dcp.async_save`` runs.

    Args:
        previous, peers: see ``Save``.
        group: the group that the caller passed to ``dcp.async_save``; None for the default group.

    Attributes:
        caller: the thread that called ``dcp.async_save``.
    """

    def __init__(self, previous: Save | None, peers: Peers | None, group: dist.ProcessGroup | None):
        super().__init__(previous, peers)
        self.caller = threading.current_thread()
        self._group = group
        self._is_steered = False

    @property
    def group(self) -> dist.ProcessGroup | None:
        replaced = self.peers is None or any(self._group is other for other in self.peers.instead_of)
        return super().group if replaced else self._group

    def check(self) -> None:
        if not self._is_steered:
            self._is_steered = True
            if self.peers is not None:
                _coordinate_through(self.peers)
        super().check()


class StagedState(Future):  # type: ignore[type-arg]
    """The future that ``stage`` returns to ``dcp.async_save``; it holds the copied state from the start.

    Args:
        save: the save.
        state: the copied state.
        raise_earlier: a function that raises unread errors of earlier saves, called when the save has begun.
    """

    def __init__(self, save: StagedSave, state: dict[str, Any], raise_earlier: Callable[[], None]):
        super().__init__()
        self._save = save
        self._raise_earlier = raise_earlier
        self.set_result(state)

    def done(self) -> bool:
        """Return True. Called from ``dcp.async_save``, also learn the save's path and its future.

        Raises:
            CheckpointError: an earlier save failed, and nobody has read its error. This save has begun.
        """
        if not self._save.is_handed_over:
            call = _calling_async_save()
            if call is not None:
                upload, path = call
                self._save.hand_over(_as_upload(upload), path)
                self._raise_earlier()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Return the copied state. In DCP's thread, wait until earlier saves have ended."""
        if threading.current_thread() is not self._save.caller:
            self._save.wait_for_turn()
            self._save.requests.join()  # DCP's thread runs nothing else
        return super().result(timeout)


def _calling_async_save() -> tuple[Future[Any], Location | None] | None:
    """Return the future and the path of the ``dcp.async_save`` that calls ``done``; None if another function does."""
    frame = sys._getframe(2)
    if frame.f_code.co_name != "async_save" or "upload_future" not in frame.f_locals:
        return None
    path = getattr(frame.f_locals["storage_writer"], "checkpoint_id", None)
    if path is None:  # torch 2.15 makes the storage writer in its thread
        path = frame.f_locals.get("checkpoint_id")
    try:
        return frame.f_locals["upload_future"], None if path is None else Location.of(path)
    except (ImportError, TypeError, ValueError):  # only the storage knows what its checkpoint_id means
        return frame.f_locals["upload_future"], None


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

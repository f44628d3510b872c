"""PerRank: a value that every rank saves and loads separately."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.state.ranks import RankState, Resize

T = TypeVar("T")


class PerRank(Generic[T]):
    """A value that every rank saves and loads separately, such as the position of a data loader.

    Without ``PerRank``, an object is saved from one rank, and all ranks load that object. With it, each rank's value is
    saved under a key with the rank in it, such as ``loader.rank3``, and each rank reads only its own key. ``PerRank``
    is a ``Stateful``. It must be a top-level value of a state dict, and works in ``save``, ``load``, ``restore``,
    ``CheckpointManager``, and in ``dcp.save`` with ``SPMDSavePlanner``::

        manager.save(step, {"model": model.state_dict(), "loader": xc.PerRank(loader)})
        manager.restore_latest(model=model, loader=xc.PerRank(loader))

    Args:
        value: a ``Stateful``, a dict to load in place, or any other value that can be saved.
        resize: what a load does if the checkpoint was saved with another world size. "error" (default): raise
            ``MismatchError`` on all ranks, and change nothing. "warn": ranks with state in the checkpoint load that
            state, the other ranks keep the value they have, and warnings say so.
        process_group: the ranks that save together; default: all ranks.

    Attributes:
        value: the value. After a load, the loaded value, unless the value is a ``Stateful``.
    """

    def __init__(self, value: T, *, resize: Resize = "error", process_group: dist.ProcessGroup | None = None):
        if resize not in ("error", "warn"):
            raise ValueError(f'resize must be "error" or "warn", not {resize!r}')
        self.value = value
        self._resize: Resize = resize
        self._group = process_group

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, under a key with the rank in it."""
        state = self.value.state_dict() if isinstance(self.value, Stateful) else self.value
        processes = Processes(self._group)
        return RankState(state, processes.rank, processes.size, self._resize)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's value from a state that was loaded into the result of ``state_dict``."""
        assert isinstance(state_dict, RankState)
        if state_dict.lacking:
            return
        if isinstance(self.value, Stateful):
            self.value.load_state_dict(state_dict[state_dict.own])
        else:
            self.value = state_dict[state_dict.own]

    def __reduce__(self) -> Any:
        raise CheckpointError(
            "PerRank was found inside another value. It must be a top-level value of the state dict, because DCP calls "
            "state_dict() only on those"
        )

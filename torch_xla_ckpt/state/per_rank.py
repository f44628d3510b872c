"""PerRank: what each rank saves and loads for itself."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.state.ranks import RankState, Resize

T = TypeVar("T")


class PerRank(Generic[T]):
    """A value of which every rank saves and loads its own, such as a data loader's position.

    What is not a tensor is otherwise saved from one rank, and all ranks load that. Wrapped in ``PerRank`` it lies under
    a key with the rank in it, ``loader.rank3``, and each rank reads its own only. It is a ``Stateful``: a top-level
    value of a state dict, for ``save``, ``load``, ``restore``, ``CheckpointManager``, and for ``dcp.save`` with
    ``SPMDSavePlanner``::

        manager.save(step, {"model": model.state_dict(), "loader": xc.PerRank(loader)})
        manager.restore_latest(model=model, loader=xc.PerRank(loader))

    Args:
        value: a ``Stateful``, a dict that is loaded in place, or any other value that can be saved.
        resize: what a load does if the checkpoint was saved by another number of ranks. "error" (default): it raises
            ``MismatchError`` on all ranks, and nothing is changed. "warn": each rank that has state of its own in the
            checkpoint takes it, the others keep what they have, and warnings say so.
        process_group: the processes that save together; default: all.

    Attributes:
        value: the value; what was loaded, after a load, if the value is no ``Stateful``.
    """

    def __init__(self, value: T, *, resize: Resize = "error", process_group: dist.ProcessGroup | None = None):
        if resize not in ("error", "warn"):
            raise ValueError(f'resize must be "error" or "warn", not {resize!r}')
        self.value = value
        self._resize: Resize = resize
        self._group = process_group

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, under a key with the rank in it."""
        state = self.value.state_dict() if isinstance(self.value, Stateful) else self.value
        several = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank(self._group) if several else 0
        ranks = dist.get_world_size(self._group) if several else 1
        return RankState(state, rank, ranks, self._resize)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a state that was loaded into the result of ``state_dict``."""
        assert isinstance(state_dict, RankState)
        if state_dict.lacking:
            return
        if isinstance(self.value, Stateful):
            self.value.load_state_dict(state_dict[state_dict.own])
        else:
            self.value = state_dict[state_dict.own]

    def __reduce__(self) -> Any:
        raise CheckpointError(
            "PerRank must be a top-level value of the state dict, because DCP asks only those for their state"
        )

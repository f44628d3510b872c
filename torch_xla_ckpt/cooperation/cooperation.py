"""The agreement of all ranks to read each byte of one load once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.cooperation.assignment import assign
from torch_xla_ckpt.cooperation.exchange import Exchange
from torch_xla_ckpt.cooperation.needs import Needs, Share
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError

T = TypeVar("T")

LEAST_BYTES = 64 << 20
"""Bytes that reading together must save if nobody has asked for it. For fewer, the store takes little time anyway."""


class _Wish(NamedTuple):
    """What one rank brings to the agreement.

    Args:
        cooperative: the option of the call.
        can: whether the rank's storage reader can read together with others.
        is_remote: whether the rank reads from a store behind requests.
        path: a text that is the same for all paths of one folder.
    """

    cooperative: bool | None
    can: bool
    is_remote: bool
    path: str


class Cooperation:
    """Ranks that read each byte once.

    Args:
        processes: the ranks.
        is_required: whether a rank has asked for it, so that the ranks also read few bytes together.
        doing: the operation, for errors.
    """

    def __init__(self, processes: Processes, is_required: bool, doing: str):
        self._processes = processes
        self._is_required = is_required
        self._doing = doing
        self._exchange: Exchange | None = None

    def from_first(self, find: Callable[[], T]) -> T | None:
        """Call ``find`` on the first rank, and return its result on the other ranks. All ranks must call this.

        Returns:
            None on the other ranks, if ``find`` failed.

        Raises:
            Exception: on the first rank, what ``find`` raised.
        """
        if self._processes.rank:
            found: T | None = self._processes.from_first(_unused, self._doing)
            return found
        try:
            value = find()
        except BaseException:
            self._processes.from_first(lambda: None, self._doing)
            raise
        return self._processes.from_first(lambda: value, self._doing)

    def assign(self, needs: list[Needs]) -> list[Share] | None:
        """Return each rank's part; None if it is not worthwhile. The coordinator calls this."""
        return assign(needs, 0 if self._is_required else LEAST_BYTES)

    def exchange(self) -> Exchange:
        """Return the connections between the ranks. All ranks must make the first call at the same point."""
        if self._exchange is None:
            timeout = _dcp.timeout_of(self._processes.group)
            new_group = functools.partial(self._processes.new_group, timeout, self._doing)
            self._exchange = Exchange(new_group, self._processes.ranks, self._doing)
        return self._exchange

    def end(self) -> None:
        """Close the connections. All ranks must have ended the load, or given it up."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None


def agree(
    processes: Processes, cooperative: bool | None, *, can: bool, is_remote: bool, path: str, doing: str
) -> Cooperation | None:
    """Agree whether to read each byte once. All ranks must call this.

    Args:
        processes: the ranks.
        cooperative: the option of the call: True asks for it, False forbids it, and None leaves it to the others and
            to the kind of the storage.
        can: whether this rank's storage reader can read together with others.
        is_remote: whether this rank reads from a store behind requests.
        path: a text that is the same for all paths of one folder; ranks that read from several read by themselves.
        doing: the operation, for errors.

    Returns:
        None if the ranks read by themselves.

    Raises:
        CheckpointError: the ranks want different things, or a rank cannot do what is asked for.
    """
    if processes.size == 1:
        return None
    wishes: list[_Wish] = processes.gather(_Wish(cooperative, can, is_remote, path), doing)
    asking = [rank for rank, wish in zip(processes.ranks, wishes) if wish.cooperative]
    refusing = [rank for rank, wish in zip(processes.ranks, wishes) if wish.cooperative is False]
    unable = [rank for rank, wish in zip(processes.ranks, wishes) if not wish.can]
    if asking and refusing:
        raise CheckpointError(
            f"{doing} failed: cooperative=True on rank {_listed(asking)}, and cooperative=False on rank "
            f"{_listed(refusing)}. Nothing was changed. Pass the same value on all ranks"
        )
    if asking and unable:
        raise CheckpointError(
            f"{doing} failed: cooperative=True needs a ShardReader, and rank {_listed(unable)} has another storage "
            "reader. Nothing was changed. Leave out storage_reader=, or cooperative="
        )
    paths = {wish.path: rank for rank, wish in zip(reversed(processes.ranks), reversed(wishes))}
    if asking and len(paths) > 1:
        first, second = list(paths)[-1], list(paths)[-2]
        raise CheckpointError(
            f"{doing} failed: cooperative=True, but rank {paths[first]} loads from {first}, and rank {paths[second]} "
            f"from {second}. Nothing was changed. Pass the same path on all ranks, or leave out cooperative="
        )
    if refusing or unable or len(paths) > 1 or not (asking or all(wish.is_remote for wish in wishes)):
        return None
    return Cooperation(processes, bool(asking), doing)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _unused() -> Any:
    raise AssertionError("only the first rank is asked")

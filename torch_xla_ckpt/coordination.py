"""Coordination of the ranks that save or load together.

Whether there is a process group at all, one rank's answer on all ranks, one rank's error on all ranks, and the names
of ranks that are missing.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError

T = TypeVar("T")
# After a failed collective: seconds to wait for the other ranks to report its failure, and seconds between two looks.
_PATIENCE = 5.0
_LOOK = 0.1
# What other ranks had last reported of failed operations when this process looked, by the key in the store.
_reports: dict[str, bytes] = {}


class Processes:
    """The ranks of a process group, or one process without a group.

    Every method with the argument ``doing`` is a collective: all ranks must call it at the same point. ``doing`` names
    the operation and its path for error messages. It must be the same text on all ranks.

    Args:
        group: a group that gathers objects. None: the default group.
        alone: whether this process works by itself although torch.distributed is initialised. Default: False.

    Attributes:
        group: as above.
        alone: whether this process works by itself; always True if torch.distributed is not initialised.
        rank: this process's rank in the group; 0 if alone.
        size: the number of ranks; 1 if alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, alone: bool = False):
        self.group = group
        self.alone = alone or not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group, as numbered in the default group."""
        return [0] if self.alone else dist.get_process_group_ranks(self.group)

    def new_group(self, timeout: timedelta, doing: str) -> dist.ProcessGroup:
        """Create another gloo group of these ranks.

        Args:
            timeout: longest wait in the new group and in its creation.
            doing: see the class.

        Raises:
            CheckpointError: a rank did not come in time.
        """
        with self.worded(doing):
            return _dcp.new_group(self.group, timeout)

    def gather(self, value: T, doing: str) -> list[T]:
        """Return the values of all ranks, in the order of ``ranks``."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        with self.worded(doing):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def gather_on(self, rank: int, value: T, doing: str) -> list[T]:
        """Return the values of all ranks on the rank of this number in the group, in the order of ``ranks``.

        The other ranks get an empty list.
        """
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size if rank == self.rank else []
        with self.worded(doing):
            dist.gather_object(value, found or None, dst=self.ranks[rank], group=self.group)
        return found

    def from_first(self, find: Callable[[], T], doing: str) -> T:
        """Call ``find`` on the first rank, and return its result on all ranks.

        Raises:
            CheckpointError: on all ranks, if ``find`` failed.
        """
        if self.alone:
            return find()
        found: list[Any] = [None, None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                found[0] = find()
            except Exception as failed:
                error = failed
                found[1] = f"rank {self.ranks[0]}: {_text(failed)} (while {doing})"
        with self.worded(doing):
            dist.broadcast_object_list(found, src=self.ranks[0], group=self.group)
        if found[1] is not None:
            raise CheckpointError(found[1]) from error
        return found[0]  # type: ignore[no-any-return]

    @contextmanager
    def agreed(self, doing: str) -> Iterator[None]:
        """Raise an error of one rank's block on all ranks, before any of them waits for that rank.

        Raises:
            CheckpointError: the block failed on another rank, which is named with the error. A rank's own error is
                raised unchanged.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        texts = [None if own is None else _text(own)] if self.alone else self.gather(own and _text(own), doing)
        if own is not None:
            raise own
        failed = [(rank, text) for rank, text in zip(self.ranks, texts) if text is not None]
        if failed:
            raise CheckpointError(f"rank {failed[0][0]}: {failed[0][1]} (while {doing})")

    @contextmanager
    def worded(self, doing: str, *, only_collectives: bool = True) -> Iterator[None]:
        """Turn an error of torch.distributed in the block into one that names the operation and the missing ranks.

        Args:
            doing: see the class.
            only_collectives: whether all RuntimeErrors of the block come from collectives. Default: True. If False,
                they are told apart by their text.

        Raises:
            CheckpointError: a rank did not come in time, or the connection to one broke.
        """
        try:
            yield
        except RuntimeError as error:
            if self.alone or not (only_collectives or _is_of_collectives(error)):
                raise
            raise CheckpointError(
                f"{doing} failed while the ranks waited for each other: {self._missing(doing)} "
                f"({type(error).__name__}: {error}). All ranks must make the same calls in the same order; if one of "
                "them is slow, give a longer timeout"
            ) from error

    def _missing(self, doing: str) -> str:
        """Return, in words, which ranks do not report within a few seconds that the same operation failed for them."""
        try:
            key = f"torch_xla_ckpt/failed/{_name(self.group)}/{doing}"
            store = _dcp.default_store()
            store.set(f"{key}/{self.rank}", uuid.uuid4().hex)
            deadline = time.monotonic() + _PATIENCE
            never = threading.Event()
            silent = [n for n in range(self.size) if n != self.rank]
            while True:
                silent = [n for n in silent if not _has_new_report(store, f"{key}/{n}")]
                if not silent or time.monotonic() > deadline:
                    break
                never.wait(_LOOK)
        except RuntimeError as error:
            return f"rank 0 or the launcher is gone, and with it the store that knows which other ranks are ({error})"
        if not silent:
            return "all ranks came, but the connection between them broke"
        here = ", ".join(str(rank) for n, rank in enumerate(self.ranks) if n not in silent)
        return f"rank {', '.join(str(self.ranks[n]) for n in silent)} did not come, rank {here} did"


def _has_new_report(store: dist.Store, key: str) -> bool:
    """Whether a rank has reported since the last failure of the same operation in this process."""
    if not store.check([key]):
        return False
    report = store.get(key)
    is_new = report != _reports.get(key)
    _reports[key] = report
    return is_new


def _is_of_collectives(error: RuntimeError) -> bool:
    """Whether a collective raised the error because a rank did not answer. gloo's errors have no type of their own."""
    kind = getattr(dist, "DistError", None)
    if kind is not None and isinstance(error, kind):
        return True
    text = str(error)
    return any(words in text for words in ("gloo/transport", "Connection closed by peer", "Timed out", "pair closure"))


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _name(group: dist.ProcessGroup | None) -> str:
    return "default" if group is None else str(group.group_name)

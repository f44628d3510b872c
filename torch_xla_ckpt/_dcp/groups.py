"""torch.distributed's process groups and the store that connects their ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# Numbers for the names of groups made here, by the group whose ranks they have. After ``destroy_process_group``, the
# new default group has the name of the old one. It counts from 1 again, because another rank may be a new process.
_numbers: MutableMapping[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def new_group(of: dist.ProcessGroup | None, timeout: timedelta) -> dist.ProcessGroup:
    """Create a gloo group with the ranks of ``of``, or of the default group. All of these ranks must call this.

    The ranks find each other in the store under the group's name. ``dist.new_group`` makes the name from the number of
    groups that the process has or has made. This number differs between ranks that are in different groups, and
    between ranks whose threads make groups in different orders. So the name is made here, from the name of ``of`` and
    the number of groups that were made of it.
    """
    c10d = dist.distributed_c10d
    parent = c10d._get_default_group() if of is None else of
    number = next(_numbers.setdefault(parent, itertools.count(1)))
    name = f"torch_xla_ckpt/{parent.group_name}/{number}"
    ranks = dist.get_process_group_ranks(parent)
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        c10d.Backend("gloo"),
        c10d._get_default_store(),
        name,  # type: ignore[arg-type, unused-ignore]
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Return the longest wait in a group, or in the default group; torch's default if the backend does not tell."""
    found = dist.distributed_c10d._get_default_group() if group is None else group
    try:
        timeout = found._get_backend(torch.device("cpu")).options._timeout  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return dist.distributed_c10d.default_pg_timeout
    return timeout if isinstance(timeout, timedelta) else dist.distributed_c10d.default_pg_timeout


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a group can be used; False after ``destroy_process_group``."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def default_store() -> dist.Store:
    """Return the store through which torch.distributed was set up, over a connection of its own if possible."""
    store = dist.distributed_c10d._get_default_store()
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):
        return store

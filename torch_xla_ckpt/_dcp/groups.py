"""torch.distributed's process groups and the store that connects their ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def new_group(of: dist.ProcessGroup | None, timeout: timedelta) -> dist.ProcessGroup:
    """Create a gloo group with the ranks of ``of``, or of the default group. All of these ranks must call this."""
    ranks = dist.get_process_group_ranks(of)
    everyone = len(ranks) == dist.get_world_size()
    # torch_xla replaces ``dist.new_group`` by a function with fewer options.
    new = dist.distributed_c10d.new_group
    return new(ranks, timeout=timeout, backend="gloo", use_local_synchronization=not everyone)


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

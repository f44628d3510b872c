"""Free memory of this host. Virtual XLA devices keep their tensors in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MEMORY = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    """File names of the memory controller, which differ between the two versions of cgroups."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def available() -> int | None:
    """Return the bytes of host memory that this process can still take; None if the system does not report them.

    This is the kernel's estimate (MemAvailable), bounded by the limits of the process's cgroups. Page cache that can be
    reclaimed counts as free.
    """
    found = _number(_MEMORY, "MemAvailable:")
    if found is None:
        return None
    return max(0, min([found * 1024, *_left_in_cgroups()]))


def _left_in_cgroups() -> Iterator[int]:
    """Yield the bytes left below the limit of each cgroup of this process that has a limit."""
    for folder, names in _cgroups():
        limit, usage = _first_number(folder / names.limit), _first_number(folder / names.usage)
        if limit is not None and usage is not None:
            yield limit - usage + (_number(folder / "memory.stat", names.reclaimable) or 0)


def _cgroups() -> Iterator[tuple[Path, _Names]]:
    """Yield the folders of this process's memory cgroups, from the innermost to the root."""
    for line in _text(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", _V1
        elif not controllers:
            root, names = _CGROUPS, _V2
        else:
            continue
        # In a container the path may be the host's. Then only the root exists, and the root is the container's own.
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield folder, names
            if folder == root:
                break


def _number(path: Path, name: str) -> int | None:
    """Return the number after ``name`` in a file whose lines are names and numbers."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _first_number(path: Path) -> int | None:
    """Return the number in a file; None if the file says "max", which means no limit, or does not exist."""
    words = _text(path).split()
    return int(words[0]) if words and words[0].isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""

"""Files in a folder without a committed checkpoint: leftovers of saves, and saves whose commit was removed."""

from __future__ import annotations

from collections.abc import Mapping

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.protocols import Entry, Folder
from torch_xla_ckpt.storage.file_names import lease_name, manifest_name, save_id_of, temporary_name
from torch_xla_ckpt.storage.lease import live_saves
from torch_xla_ckpt.storage.manifest import parsed

_UNLEASED = 3600.0  # seconds without a write after which a save without a lease counts as ended


def leftovers(folder: Folder, listing: Mapping[str, Entry], now: float | None) -> frozenset[str]:
    """Return the files that no save will need any more, in a folder without a committed checkpoint.

    Files of saves that may be alive are not among them. A save without a lease comes from an older version of this
    package. It may be alive until it has written its manifest, or until it has not written for an hour.

    Args:
        folder: the folder.
        listing: the folder's files.
        now: the time by the storage's clock, in seconds; None if it has no clock.
    """
    alive = set(live_saves(folder, listing, now))
    files: dict[str, list[str]] = {}
    for name in listing:
        save_id = save_id_of(name)
        if save_id is not None:
            files.setdefault(save_id, []).append(name)
    for save_id, names in files.items():
        if not {lease_name(save_id), manifest_name(save_id)}.intersection(names):
            times = [modified for name in names if (modified := listing[name].modified) is not None]
            if len(times) < len(names) or now is None or now - max(times) < _UNLEASED:
                alive.add(save_id)
    return frozenset(name for save_id, names in files.items() if save_id not in alive for name in names)


def complete_saves(folder: Folder, listing: Mapping[str, Entry]) -> tuple[str, ...]:
    """Return the ids of saves that were committed, in a folder without ``.metadata``, and whose files are all there.

    A save writes its manifest before the commit, and removes its lease after the commit. So a manifest without a lease
    is that of a committed save. A save whose deletion has begun does not count: ``mark_deleted`` has marked it.

    Args:
        folder: the folder.
        listing: the folder's files.
    """
    ids = {save_id for name in listing if (save_id := save_id_of(name)) is not None and name == manifest_name(save_id)}
    return tuple(
        save_id
        for save_id in sorted(ids)
        if not {lease_name(save_id), temporary_name(None, save_id)}.intersection(listing)
        and _has_all_files(folder, listing, manifest_name(save_id))
    )


def mark_deleted(folder: Folder, save_id: str) -> str:
    """Mark a committed save before its ``.metadata`` is deleted. Return the name of the mark.

    The mark is an empty file with the name of the save's temporary ``.metadata``, which is there only before a commit.
    Without it, a deletion that was interrupted would look like a checkpoint that has lost its ``.metadata``.
    """
    mark = temporary_name(None, save_id)
    folder.put(mark, b"")
    return mark


def _has_all_files(folder: Folder, listing: Mapping[str, Entry], manifest: str) -> bool:
    """Return whether all data files that a manifest lists are there in full; False if the manifest is damaged."""
    try:
        return all(
            name in listing and listing[name].size == size for name, size in parsed(folder.read(manifest))["files"]
        )
    except (CheckpointError, OSError, LookupError, TypeError, ValueError):
        return False

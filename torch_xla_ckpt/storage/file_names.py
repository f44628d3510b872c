"""Names of the files in a checkpoint's folder. ``docs/format.md`` lists them.

Every file of a save carries the save id, except ``.metadata``. So a name tells which save wrote the file.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable

from torch_xla_ckpt.errors import UnsafeObjectError
from torch_xla_ckpt.serialization import METADATA

_OURS = re.compile(
    r"__\d+_\d+-[0-9a-f]{16}\.distcp|(?:manifest|lease)-[0-9a-f]{16}\.json|(?:__\d+)?\.metadata-[0-9a-f]{16}\.tmp"
)
_STOCK_DATA = re.compile(r"__\d+_\d+\.distcp")
_SAVE_ID = re.compile(r"(?<=-)[0-9a-f]{16}(?=\.)")
_LEASE = re.compile(r"lease-([0-9a-f]{16})\.json")
_DRIVE = re.compile(r"[A-Za-z]:")  # a disk of Windows
_METADATA_OF_RANK = re.compile(r"__(\d+)" + re.escape(METADATA))


def new_save_id() -> str:
    """Return 16 random hexadecimal digits, which name the files of one save."""
    return secrets.token_hex(8)


def data_name(rank: int, number: int, save_id: str) -> str:
    """Return the name of a data file.

    Args:
        rank: the rank that writes the file.
        number: the position of the file among the rank's data files.
        save_id: the id of the save.
    """
    return f"__{rank}_{number}-{save_id}.distcp"


def manifest_name(save_id: str) -> str:
    return f"manifest-{save_id}.json"


def lease_name(save_id: str) -> str:
    return f"lease-{save_id}.json"


def metadata_name(rank: int | None) -> str:
    """Return ``.metadata``, or the name of one rank's metadata.

    Args:
        rank: the rank of a save without collectives; None for a save of all ranks.
    """
    return METADATA if rank is None else f"__{rank}{METADATA}"


def temporary_name(rank: int | None, save_id: str) -> str:
    """Return the name of the file that becomes ``metadata_name(rank)`` when a save commits."""
    return f"{metadata_name(rank)}-{save_id}.tmp"


def rank_of_metadata(name: str) -> int | None:
    """Return the rank whose metadata a file holds; None for ``.metadata`` and all other files."""
    match = _METADATA_OF_RANK.fullmatch(name)
    return None if match is None else int(match[1])


def ranks_metadata(names: Iterable[str]) -> set[str]:
    """Return the names of metadata files that ranks wrote in saves without collectives."""
    return {name for name in names if rank_of_metadata(name) is not None}


def save_id_of_lease(name: str) -> str | None:
    """Return the save id in the name of a lease; None if the file is not a lease."""
    match = _LEASE.fullmatch(name)
    return None if match is None else match[1]


def save_id_of(name: str) -> str | None:
    """Return the save id in the name of one of our files; None for ``.metadata`` and all other files."""
    match = _SAVE_ID.search(name) if is_checkpoint_file(name, stock=False) else None
    return None if match is None else match[0]


def carries_any(name: str, save_ids: Collection[str]) -> bool:
    """Return whether a name contains one of some save ids."""
    return any(save_id in name for save_id in save_ids)


def is_checkpoint_file(name: str, *, stock: bool = True) -> bool:
    """Return whether a file is data, a manifest, a lease or a temporary file of a checkpoint.

    Args:
        name: the file's name.
        stock: whether data files of stock DCP count too. Default True.
    """
    return bool(_OURS.fullmatch(name) or (stock and _STOCK_DATA.fullmatch(name)))


def replaceable(names: Iterable[str], rank: int | None) -> set[str]:
    """Return the files that a save may remove after its commit, if no other save needs them.

    Args:
        names: the files of the folder.
        rank: the rank of a save without collectives, which removes only its own files of ours; None for a save of all
            ranks, which also removes data files of stock DCP.
    """
    return {
        name
        for name in names
        if is_checkpoint_file(name, stock=rank is None)
        and (rank is None or name.startswith((f"__{rank}_", f"__{rank}.")))
    }


def require_inside(name: str) -> None:
    """Refuse the name of a file that is not in the checkpoint's folder.

    Such a name can stand in metadata that somebody else wrote.

    Raises:
        UnsafeObjectError: the name leads out of the folder.
    """
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name or _DRIVE.match(name) or any(part in ("", ".", "..") for part in parts):
        raise UnsafeObjectError(
            f"refused to open {name!r}: the checkpoint names a file outside of its folder. Do not load checkpoints "
            "from a source that you do not trust"
        )

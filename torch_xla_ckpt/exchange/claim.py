"""The claim of an export on a folder in a store: a small file there while the export runs.

Stores have no locks, and two exports of models with the same layout would leave a mixture of both. So an export first
creates the claim, which names its process, and removes it at the end. A second export finds the claim and refuses. If
the process of the claim ran on this machine and has ended, the next export removes what it had written.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from torch_xla_ckpt.errors import ConcurrentSaveError
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.storage import FileChanged, Holder

CLAIM = ".export.claim"
_SHOWN = 5  # names that an error lists


class StoreClaim:
    """The claim of one export.

    Args:
        folder: the folder that the export writes to.

    Attributes:
        is_held: whether this export has the claim.
    """

    def __init__(self, folder: Folder):
        self._folder = folder
        self._id = secrets.token_hex(8)
        self.is_held = False

    def is_there(self) -> bool:
        """Whether some export has a claim on the folder."""
        return self._folder.version(CLAIM).exists

    def take(self) -> None:
        """Create the claim. Remove what a killed export of this machine has left.

        Raises:
            ConcurrentSaveError: another export has a claim on the folder.
        """
        version = self._folder.version(CLAIM)
        left: list[str] = []
        if version.exists:
            left = self._left_by_other()
        try:
            self._folder.replace(CLAIM, [self._content([])], f"{CLAIM}.{self._id}", expected=version)
        except FileChanged:
            raise ConcurrentSaveError(
                f"another export to {self._folder.url} began at the same moment. Nothing was written. Let one program "
                "export to a path"
            ) from None
        self.is_held = True
        self._folder.remove(left)

    def announce(self, names: Sequence[str], last: str) -> None:
        """Note which files the export writes. Call this when none of them exists.

        Args:
            names: the names of all files.
            last: the one that is written when all others are complete.
        """
        self._folder.put(CLAIM, self._content(names, last))

    def require(self) -> None:
        """Check that the claim is still there.

        Raises:
            ConcurrentSaveError: it was removed, or another export has replaced it.
        """
        with suppress(FileNotFoundError):
            if _fields(self._folder.read(CLAIM)).get("id") == self._id:
                return
        self.is_held = False
        raise ConcurrentSaveError(
            f"{CLAIM} in {self._folder.url} is no longer that of this export: another program has removed or replaced "
            "it, and may have written to the same files. Remove the files there, and export again"
        )

    def release(self) -> None:
        """Remove the claim. Without effect if it was not taken."""
        if self.is_held:
            self.is_held = False
            self._folder.remove([CLAIM])

    def _content(self, names: Sequence[str], last: str = "") -> bytes:
        holder = asdict(Holder.here())
        return json.dumps({"id": self._id, "holder": holder, "files": list(names), "last": last}).encode()

    def _left_by_other(self) -> list[str]:
        """Return the files that a killed export of this machine has left.

        Raises:
            ConcurrentSaveError: the other export may still run.
        """
        try:
            fields = _fields(self._folder.read(CLAIM))
        except FileNotFoundError:  # it has just ended
            fields = {}
        holder = Holder.from_bytes(json.dumps(fields.get("holder")).encode())
        there = set(self._folder.names())
        files = fields.get("files")
        written = sorted(there & {name for name in files if isinstance(name, str)}) if isinstance(files, list) else []
        if holder is None or holder.is_alive() is not False:
            names = [CLAIM, *written]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise ConcurrentSaveError(
                f"another export is writing to {self._folder.url}: {holder or 'an unknown process'}. Nothing was "
                f"written. Wait for it, or export to another path. If it has ended, remove "
                f"{', '.join(names[:_SHOWN])}{more} there"
            )
        return [] if str(fields.get("last")) in there else written  # with the last file, the model is whole


def _fields(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}

"""Links to the newest checkpoint, which lead to whole checkpoints only."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress

from torch_xla_ckpt.storage import Location


class Links:
    """Links to checkpoints that are being written.

    ``ModelCheckpoint(save_last="link")`` makes its link when a save returns. With saves in the background, the
    checkpoint is not whole then, and a program that is killed could not go on with ``ckpt_path="last"``. So the link
    leads to the checkpoint before until the save is committed.
    """

    def __init__(self) -> None:
        self._whole: dict[str, str] = {}  # what each link led to when a save began, or leads to since one ended
        self._awaited: list[tuple[str, str]] = []  # a link, and what it is to lead to when that is committed
        self._pending: set[str] = set()  # paths of checkpoints that are being written

    def begin(self, where: Location) -> None:
        """Note where the links of a folder lead, when a save to that folder has begun."""
        if where.is_local:
            self._whole |= _links_in(where.parent.path)
            self._pending.add(os.path.realpath(where.path))

    def hold(self) -> None:
        """Let links that lead to checkpoints that are being written lead to the checkpoints before."""
        for folder in {os.path.dirname(path) for path in self._pending}:
            for link, to in _links_in(folder).items():
                if os.path.realpath(link) in self._pending:
                    self._awaited.append((link, to))
                    _point(link, self._whole.get(link))

    def end(self, where: Location, *, is_whole: bool) -> None:
        """Let the links that were held lead to a checkpoint, if it is whole."""
        path = os.path.realpath(where.path)
        self._pending.discard(path)
        for entry in [one for one in self._awaited if _target(*one) == path]:
            self._awaited.remove(entry)
            if is_whole:
                _point(*entry)
                self._whole[entry[0]] = entry[1]


def _links_in(folder: str) -> dict[str, str]:
    """Return the links in a folder, and what they lead to."""
    found: dict[str, str] = {}
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        found = {entry.path: os.readlink(entry.path) for entry in entries if entry.is_symlink()}
    return found


def _target(link: str, to: str) -> str:
    return os.path.realpath(os.path.join(os.path.dirname(link), to))


def _point(link: str, to: str | None) -> None:
    """Let a link lead to a path; remove it if there is no such path."""
    if to is None or not os.path.exists(_target(link, to)):
        os.unlink(link)
        return
    temporary = f"{link}.{secrets.token_hex(4)}.tmp"
    os.symlink(to, temporary)
    os.replace(temporary, link)

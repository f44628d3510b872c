"""One rank reads a checkpoint's index, and passes it on to the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch_xla_ckpt.cooperation import Cooperation
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.storage.checkpoint_index import CheckpointIndex


@dataclass
class FoundIndex:
    """The index of the checkpoint at a path, and how it was found.

    Args:
        index: the index.
        in_parent: True if the path leads to a file, so that the data files are in the folder that contains it.
        is_foreign: whether the checkpoint has another format than DCP's.
    """

    index: CheckpointIndex
    in_parent: bool = False
    is_foreign: bool = False


@dataclass
class _Passed:
    """What the first rank passes on.

    Args:
        files: the files that lead to the index of a DCP checkpoint, by name.
        foreign: the index of a checkpoint in another format; else None.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    foreign: FoundIndex | None = None


class _RememberingFolder:
    """A folder that knows files which were read before.

    Args:
        folder: the folder.
        files: the bytes of files, by name. Other files are added when they are read, if ``records`` is True.
        records: whether to read from the folder all the same, and to remember the bytes.
    """

    def __init__(self, folder: Folder, files: dict[str, bytes], records: bool):
        self._folder = folder
        self._files = files
        self._records = records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def read(self, name: str) -> bytes:
        """Return the bytes of a whole file."""
        if self._records:
            self._files[name] = self._folder.read(name)
        return self._files[name] if name in self._files else self._folder.read(name)


def read_together(cooperation: Cooperation, folder: Folder, find: Callable[[Folder], FoundIndex]) -> FoundIndex:
    """Find the index on the first rank, and return it on all ranks. All ranks must call this.

    A rank that gets nothing, because the first rank has failed, finds the index by itself.

    Args:
        cooperation: the ranks.
        folder: the folder at the path.
        find: finds the index in a folder.

    Raises:
        Exception: what ``find`` raised.
    """

    def find_first() -> _Passed:
        files: dict[str, bytes] = {}
        found.append(find(_remembering(folder, files, True)))
        return _Passed(foreign=found[0]) if found[0].is_foreign else _Passed(files)

    found: list[FoundIndex] = []
    passed = cooperation.from_first(find_first)
    if found:
        return found[0]
    if passed is None:
        return find(folder)
    return passed.foreign or find(_remembering(folder, passed.files, False))


def _remembering(folder: Folder, files: dict[str, bytes], records: bool) -> Folder:
    return _RememberingFolder(folder, files, records)  # type: ignore[return-value]

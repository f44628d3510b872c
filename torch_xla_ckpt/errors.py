"""What can go wrong, as exceptions that say what, why and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MismatchKind = Literal["missing", "shape", "type", "dtype", "unexpected", "ranks"]


class CheckpointError(Exception):
    """A checkpoint could not be saved or loaded. The base of every error raised by this package."""


class IncompleteCheckpointError(CheckpointError):
    """Some elements of a tensor lie in no chunk, or in more than one.

    Attributes:
        keys: the tensors concerned.
    """

    def __init__(self, message: str, keys: Sequence[str] = ()):
        super().__init__(message)
        self.keys = tuple(keys)


class ConcurrentSaveError(CheckpointError):
    """Another program saved to the same path while a save ran. The other checkpoint is whole."""


class ReplacedCheckpointError(CheckpointError):
    """The checkpoint was replaced or removed while it was read. What is there now may be whole: read it again."""


@dataclass(frozen=True)
class Damage:
    """Bytes of a checkpoint that are not what was written.

    Args:
        file: its name in the checkpoint's folder.
        start, stop: the bytes concerned. Where the damage within them lies is not known.
        keys: the tensors and objects that need these bytes.
        what: what is wrong with them.
    """

    file: str
    start: int
    stop: int
    keys: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.keys[:5])) + (f" and {len(self.keys) - 5} more" if len(self.keys) > 5 else "")
        file = self.file if self.file.isprintable() else ascii(self.file)
        return f"{shown or 'no key'}: {file}, bytes {self.start:,} to {self.stop:,}: {self.what}"


class CorruptCheckpointError(CheckpointError):
    """Files of the checkpoint are not what was written.

    Attributes:
        damages: what was found before the load was given up. ``verify`` finds everything.
    """

    def __init__(self, message: str, damages: Sequence[Damage] = ()):
        super().__init__(message)
        self.damages = tuple(damages)


@dataclass(frozen=True)
class Mismatch:
    """A key for which target and checkpoint do not fit each other.

    ``kind`` is "missing" (the checkpoint lacks the key), "shape", "type" (one is a tensor, the other is not), "dtype"
    or "unexpected" (the target lacks it), these two only where the policy says so, or "ranks" (a ``PerRank`` was saved
    by another number of ranks). ``target`` and ``saved`` say what each side has.
    """

    key: str
    kind: MismatchKind
    target: str
    saved: str

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"{self.key}: target has {self.target}, missing from the checkpoint"
        if self.kind == "unexpected":
            return f"{self.key}: checkpoint has {self.saved}, missing from the target"
        return f"{self.key}: target has {self.target}, checkpoint has {self.saved}"


class MismatchError(CheckpointError):
    """The target and the checkpoint do not fit each other.

    Attributes:
        mismatches: one ``Mismatch`` for each key concerned.
    """

    def __init__(self, message: str, mismatches: Sequence[Mismatch] = ()):
        super().__init__(message)
        self.mismatches = tuple(mismatches)


class UnsafeObjectError(CheckpointError):
    """An item of the checkpoint can only be loaded by running code named in the file.

    Attributes:
        key: the item.
        types: the qualified names it asks for, where they could be read.
    """

    def __init__(self, message: str, key: str = "", types: Sequence[str] = ()):
        super().__init__(message)
        self.key = key
        self.types = tuple(types)

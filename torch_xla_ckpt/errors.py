"""The exceptions of this package. Each message names what happened to which key or file, the reason, and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MismatchKind = Literal["missing", "shape", "type", "dtype", "unexpected", "ranks"]


class CheckpointError(Exception):
    """A checkpoint could not be saved or loaded. Base of all errors of this package."""


class IncompleteCheckpointError(CheckpointError):
    """Some elements of a tensor are in no chunk, or in more than one.

    Attributes:
        keys: the keys of these tensors.
    """

    def __init__(self, message: str, keys: Sequence[str] = ()):
        super().__init__(message)
        self.keys = tuple(keys)


class ConcurrentSaveError(CheckpointError):
    """Another program saved to the same path during this save. The other program's checkpoint is whole."""


class ReplacedCheckpointError(CheckpointError):
    """Another save replaced or removed the checkpoint while it was read. Read again: a new one may be there."""


class OtherRankError(CheckpointError):
    """This rank waited for another rank, which failed or left. The other rank's error is the reason, if it has one."""


@dataclass(frozen=True)
class Damage:
    """A damaged byte range of a checkpoint's file.

    Args:
        file: the file's name in the checkpoint's folder.
        start, stop: the first byte, and the byte after the last one. The damage is anywhere between them.
        keys: the keys of the tensors and objects that need these bytes.
        what: a description of the damage.
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
    """Bytes in files of the checkpoint are not those that were saved.

    Attributes:
        damages: the damage that was found until the load stopped. ``verify`` finds all damage.
    """

    def __init__(self, message: str, damages: Sequence[Damage] = ()):
        super().__init__(message)
        self.damages = tuple(damages)


@dataclass(frozen=True)
class Mismatch:
    """A key whose values in the target and in the checkpoint differ in a way that prevents loading.

    Args:
        key: the key in the target, or in the checkpoint if the target lacks it.
        kind: "missing": the checkpoint lacks the key. "shape": the shapes differ. "type": one value is a tensor, the
            other is not. "dtype": the dtypes differ, and the policy refuses to cast. "unexpected": the target lacks the
            key, and the policy refuses that. "ranks": a ``PerRank`` was saved by another number of ranks.
        target: the target's value, in words.
        saved: the checkpoint's value, in words.
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
    """Target and checkpoint differ in a way that prevents loading.

    Attributes:
        mismatches: one ``Mismatch`` for each key that differs.
    """

    def __init__(self, message: str, mismatches: Sequence[Mismatch] = ()):
        super().__init__(message)
        self.mismatches = tuple(mismatches)


class UnsafeObjectError(CheckpointError):
    """Loading an object of the checkpoint would run code that the file names.

    Attributes:
        key: the key of the object.
        types: the qualified names of the types that the object needs, as far as they could be read.
    """

    def __init__(self, message: str, key: str = "", types: Sequence[str] = ()):
        super().__init__(message)
        self.key = key
        self.types = tuple(types)

"""What a file or folder of another format holds: tensors with their places, and objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import xxhash

from torch_xla_ckpt.errors import CorruptCheckpointError, Damage
from torch_xla_ckpt.state import Path


class TensorPlace(NamedTuple):
    """Where the elements of a tensor lie, in C order.

    Args:
        dtype: dtype of the elements.
        shape: shape of the tensor.
        file: name of the file.
        offset: position of the first element in the file, in bytes.
        data: the elements, if the file does not hold them as they lie in memory. Default: None.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    data: bytes | None = None


@dataclass(frozen=True)
class Contents:
    """The keys of a file or folder, and where their values lie.

    Args:
        kind: the format, for people: "safetensors" or "torch.save".
        files: size in bytes of each file that was opened, by name.
        tensors: the place of each tensor, by key.
        version: a checksum of everything that was read to find the places. It changes when another model is put there.
        objects: the bytes of each value that is no tensor, as ``torch.save`` writes them. Default: none.
        paths: the path of each key in the saved state dict. Default: none, because the keys are flat.
        bytes_read: bytes that were read to find the places. Default: 0.
        texts: what the files say about themselves, such as how a model was quantized. Default: none.
    """

    kind: str
    files: Mapping[str, int]
    tensors: Mapping[str, TensorPlace]
    version: bytes
    objects: Mapping[str, bytes] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    bytes_read: int = 0
    texts: Mapping[str, str] = field(default_factory=dict)


def version_of(parts: Sequence[bytes]) -> bytes:
    """Return a checksum of several byte strings and their lengths."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def is_text(name: str) -> bool:
    """Return whether a name can be encoded. JSON and pickles can have half of a surrogate pair, which cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def malformed(file: str, start: int, stop: int, problem: str) -> CorruptCheckpointError:
    """Return the error for a file whose own description of its content is wrong."""
    damage = Damage(file, start, stop, (), problem)
    return CorruptCheckpointError(
        f"{damage.file} cannot be read: {problem}. The file is damaged, incomplete, or of another format. Nothing was "
        "loaded. Download or export the file again",
        [damage],
    )

"""The seal: the last line of our ``.metadata``, which names the save and holds two checksums.

The seal follows DCP's pickle, where ``pickle.load`` does not look. It binds the pickle to the manifest, and lets our
reader leave the pickle alone. ``docs/format.md`` specifies it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from torch_xla_ckpt.protocols import Bytes
from torch_xla_ckpt.storage.stored import checksum

_SEAL = re.compile(rb"\ntorch_xla_ckpt ([0-9a-f]{16}) ([0-9a-f]{16}) ([0-9a-f]{16})\n")
_LENGTH = len("\ntorch_xla_ckpt \n") + 3 * 16 + 2
_OWN_CHECKSUM_LENGTH = 16 + len("\n")


@dataclass(frozen=True)
class Seal:
    """A seal, and the pickle before it.

    Args:
        metadata: the bytes of ``.metadata``.
        save_id: the id of the save that wrote ``.metadata``.
        manifest: the checksum of the manifest file.
        is_intact: whether the checksum of ``.metadata`` in the seal is right.
    """

    metadata: bytes
    save_id: str
    manifest: bytes
    is_intact: bool

    @property
    def pickled(self) -> bytes:
        """The bytes of ``.metadata`` before the seal."""
        return self.metadata[:-_LENGTH]


class SealedPieces:
    """The bytes of ``.metadata``, in pieces: DCP's pickle, and the seal. They can be taken once.

    Args:
        pickled: DCP's metadata, pickled, in pieces.
        save_id: the id of the save.
        manifest: the checksum of the manifest file.
    """

    def __init__(self, pickled: Iterable[Bytes], save_id: str, manifest: bytes):
        self._pickled = pickled
        self._line = f"\ntorch_xla_ckpt {save_id} {manifest.hex()} ".encode()
        self._seal: bytes | None = None

    def __iter__(self) -> Iterator[Bytes]:
        hasher = xxhash.xxh3_64()
        for piece in self._pickled:
            hasher.update(piece)
            yield piece
        hasher.update(self._line)
        self._seal = self._line + hasher.hexdigest().encode() + b"\n"
        yield self._seal

    def is_at(self, ending: bytes) -> bool:
        """Whether a file with this ending has these bytes: the seal holds the checksum of all of them."""
        return self._seal is not None and ending.endswith(self._seal)


def read_seal(metadata: bytes) -> Seal | None:
    """Return the seal at the end of ``.metadata``; None if there is none.

    Args:
        metadata: the bytes of ``.metadata``.
    """
    match = _SEAL.fullmatch(metadata, max(len(metadata) - _LENGTH, 0))
    if match is None:
        return None
    save_id = match[1].decode()
    first, second = (bytes.fromhex(found.decode()) for found in match.groups()[1:])
    view = memoryview(metadata)
    if checksum(view[:-_OWN_CHECKSUM_LENGTH]) == second:
        return Seal(metadata, save_id, first, is_intact=True)
    if checksum(view[:-_LENGTH]) == first:  # as the first versions wrote it: the checksum of the pickle comes first
        return Seal(metadata, save_id, second, is_intact=True)
    return Seal(metadata, save_id, first, is_intact=False)


def sealed_save_id(ending: bytes) -> str | None:
    """Return the save id in the seal of ``.metadata``; None if there is no seal.

    Args:
        ending: the last bytes of ``.metadata``, at least as many as a seal has.
    """
    match = _SEAL.fullmatch(ending, max(len(ending) - _LENGTH, 0))
    return None if match is None else match[1].decode()

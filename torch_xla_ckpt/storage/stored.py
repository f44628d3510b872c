"""Where a saved item lies in its data file, and the checksums of its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import xxhash

from torch_xla_ckpt.protocols import Bytes
from torch_xla_ckpt.storage.frame import ALIGNMENT

BLOCK = 4 << 20
"""Bytes that share one checksum, counted from the start of each item."""
TINY = 4 << 10
"""Item size in bytes up to which one thread handles local files. More threads would only fight over Python's lock."""
CHECKSUM_BYTES = 8


class Stored(NamedTuple):
    """Where one item lies. The first three fields have DCP's names.

    Args:
        relative_path: name of the data file.
        offset: position of the item's first byte in the data file.
        length: bytes of the item, as stock DCP reads it.
        data: position of the tensor's first element in the item. None for objects, and for tensors that only
            ``torch.load`` can read.
        checksums: XXH3-64 of each block, 8 bytes each, big-endian. None where the checkpoint has no checksums.
        sharding: the live tensor's sharding, for people to read.
        transform_descriptors: DCP's extensions that wrote the item. This package never uses extensions.
        inline: the item's bytes, if they are in memory already and not in the file as they are. Default: None.
    """

    relative_path: str
    offset: int
    length: int
    data: int | None = None
    checksums: bytes | None = None
    sharding: str | None = None
    transform_descriptors: Sequence[str] | None = None
    inline: bytes | None = None

    @classmethod
    def of(cls, entry: Any) -> Stored:
        """Return an entry of DCP's ``storage_data`` as a ``Stored``."""
        if isinstance(entry, cls):
            return entry
        extensions = getattr(entry, "transform_descriptors", None)
        return cls(entry.relative_path, entry.offset, entry.length, transform_descriptors=extensions)

    @property
    def extent(self) -> int:
        """Bytes of the item and the zeros up to the next item. Checksums cover all of these bytes."""
        return padded(self.length)

    def block(self, number: int) -> tuple[int, int, bytes]:
        """Return where a block starts and stops in the data file, and its checksum."""
        assert self.checksums is not None
        start = number * BLOCK
        checksum = self.checksums[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES]
        return self.offset + start, self.offset + min(start + BLOCK, self.extent), checksum

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return math.ceil(self.extent / BLOCK)


def padded(length: int) -> int:
    """Round ``length`` up to where the next item may start."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def checksum(data: Bytes) -> bytes:
    """Return the XXH3-64 of ``data`` in its canonical, big-endian form."""
    return xxhash.xxh3_64_digest(data)

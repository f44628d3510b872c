"""The seal: the last line of our ``.metadata``, which names the save and holds two checksums.

The seal follows DCP's pickle, where ``pickle.load`` does not look. It binds the pickle to the manifest, and lets our
reader leave the pickle alone. ``docs/format.md`` specifies it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch_xla_ckpt.storage.stored import checksum

_SEAL = re.compile(rb"\ntorch_xla_ckpt ([0-9a-f]{16}) ([0-9a-f]{16}) ([0-9a-f]{16})\n")
_LENGTH = len("\ntorch_xla_ckpt \n") + 3 * 16 + 2
_OWN_CHECKSUM_LENGTH = 16 + len("\n")


@dataclass(frozen=True)
class Seal:
    """A seal, and the pickle before it.

    Args:
        pickled: the bytes of ``.metadata`` before the seal.
        save_id: the id of the save that wrote ``.metadata``.
        manifest: the checksum of the manifest file.
        is_intact: whether the checksum of ``.metadata`` in the seal is right.
    """

    pickled: bytes
    save_id: str
    manifest: bytes
    is_intact: bool


def add_seal(pickled: bytes, save_id: str, manifest: bytes) -> bytes:
    """Return the bytes of ``.metadata``.

    Args:
        pickled: DCP's metadata, pickled.
        save_id: the id of the save.
        manifest: the bytes of the manifest file.
    """
    data = pickled + f"\ntorch_xla_ckpt {save_id} {checksum(manifest).hex()} ".encode()
    return data + checksum(data).hex().encode() + b"\n"


def read_seal(metadata: bytes) -> Seal | None:
    """Return the seal at the end of ``.metadata``; None if there is none.

    Args:
        metadata: the bytes of ``.metadata``.
    """
    match = _SEAL.fullmatch(metadata, max(len(metadata) - _LENGTH, 0))
    if match is None:
        return None
    pickled, save_id = metadata[:-_LENGTH], match[1].decode()
    first, second = (bytes.fromhex(found.decode()) for found in match.groups()[1:])
    if checksum(pickled) == first:  # as the first versions wrote it: the checksum of the pickle, then the manifest's
        return Seal(pickled, save_id, second, is_intact=True)
    return Seal(pickled, save_id, first, checksum(metadata[:-_OWN_CHECKSUM_LENGTH]) == second)


def sealed_save_id(ending: bytes) -> str | None:
    """Return the save id in the seal of ``.metadata``; None if there is no seal.

    Args:
        ending: the last bytes of ``.metadata``, at least as many as a seal has.
    """
    match = _SEAL.fullmatch(ending, max(len(ending) - _LENGTH, 0))
    return None if match is None else match[1].decode()

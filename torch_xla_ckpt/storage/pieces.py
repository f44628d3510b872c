"""Bytes of large files in pieces. A piece is small enough that Python's lock is never held for long."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from torch_xla_ckpt.protocols import Bytes

_PIECE = 1 << 20
_LARGE = 1 << 18  # bytes of a piece that is worth a write of its own


def joined_pieces(pieces: Iterable[Bytes]) -> Iterator[Bytes]:
    """Yield the same bytes in fewer pieces: small ones are joined up to a MiB, and large ones are not copied."""
    waiting: list[Bytes] = []
    size = 0
    for piece in pieces:
        if len(piece) >= _LARGE:
            if waiting:
                yield b"".join(waiting)
                waiting, size = [], 0
            yield piece
            continue
        waiting.append(piece)
        size += len(piece)
        if size >= _PIECE:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def whole(pieces: Iterable[Bytes]) -> bytes:
    """Return all bytes as one object."""
    data = io.BytesIO()
    for piece in pieces:
        data.write(piece)
    return data.getvalue()

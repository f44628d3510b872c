"""Data files: the bytes of items, one after the other, each checksummed while it is written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import xxhash

from torch_xla_ckpt.protocols import Bytes, Folder, Sink
from torch_xla_ckpt.storage.file_names import data_name
from torch_xla_ckpt.storage.stored import BLOCK, Stored, checksum, padded

SMALL = 256 << 10
"""Bytes below which an item is put together in memory and written with its neighbours."""

_BUFFERED = 4 << 20  # bytes of small items to write at once


class DataFiles:
    """The data files of one rank in one save. Each thread creates one for itself.

    Args:
        folder: the checkpoint's folder.
        rank: the rank.
        save_id: the id of the save.
        before: called before the first bytes of a file may be sent, by the thread that writes it. Default: nothing is
            called.
    """

    def __init__(self, folder: Folder, rank: int, save_id: str, before: Callable[[], object] = bool):
        self._folder = folder
        self._rank = rank
        self._save_id = save_id
        self._before = before
        self._count = 0
        self._lock = threading.Lock()

    def create(self, *, unchanged: bool) -> DataFile:
        """Create the next data file.

        Args:
            unchanged: True if the memory of items stays unchanged until the file is closed.
        """
        with self._lock:
            name = data_name(self._rank, self._count, self._save_id)
            self._count += 1
        if not unchanged:
            self._before()
        sink = self._folder.create(name, unchanged=unchanged)
        return DataFile(name, sink, before_close=self._before if unchanged else bool)

    def remove(self, files: Iterable[DataFile]) -> None:
        """Remove abandoned files from a store, which may have carried out requests that were answered by an error.

        An error is ignored: the next save removes what is left.
        """
        if self._folder.remote:
            with suppress(Exception):
                self._folder.remove([file.name for file in files])


class DataFile:
    """A data file being written. Each item begins at a multiple of ``ALIGNMENT``.

    Args:
        name: the file's name.
        sink: the open file.
        before_close: called before the file is closed. Default: nothing is called.

    Attributes:
        sink_seconds: seconds that writing to the sink has taken, without checksums.
    """

    def __init__(self, name: str, sink: Sink, before_close: Callable[[], object] = bool):
        self.name = name
        self.sink_seconds = 0.0
        self._sink = sink
        self._before_close = before_close
        self._end = 0
        self._small: list[Bytes] = []  # small items that are not written yet
        self._small_bytes = 0

    def append(self, parts: Sequence[Bytes], data: int | None, sharding: str | None) -> Stored:
        """Write an item.

        Args:
            parts: the item's bytes, in parts that follow one another.
            data: the position of the tensor's elements in the item; None if there is none.
            sharding: the sharding of the tensor, for people; None if it is unknown.

        Returns:
            Where the item is stored, with its checksums.
        """
        length = sum(map(len, parts))
        parts = (*parts, bytes(padded(length) - length))
        start, self._end = self._end, self._end + padded(length)
        if length < SMALL:
            whole = b"".join(parts)
            checksums = checksum(whole)
            self._small.append(whole)
            self._small_bytes += len(whole)
            if self._small_bytes >= _BUFFERED:
                self._flush()
        else:
            self._flush()
            checksums = b"".join(self._write_block(block) for block in _blocks(parts))
        return Stored(self.name, start, length, data, checksums, sharding)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._flush()
        self._before_close()
        with self._writing():
            self._sink.close()

    def abandon(self) -> None:
        """Give up the file, and remove it if possible."""
        self._sink.abandon()

    def _write_block(self, block: Sequence[Bytes]) -> bytes:
        """Write a block and return its checksum. Each piece is written while it is still in the processor's cache."""
        hasher = xxhash.xxh3_64()
        for piece in block:
            hasher.update(piece)
            with self._writing():
                self._sink.write(piece)
        return hasher.digest()

    def _flush(self) -> None:
        if self._small:
            with self._writing():
                self._sink.write(b"".join(self._small))
            self._small, self._small_bytes = [], 0

    @contextmanager
    def _writing(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.sink_seconds += time.perf_counter() - start


def _blocks(parts: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """Divide the bytes of ``parts`` into blocks of ``BLOCK`` bytes. Each block is a list of pieces."""
    block: list[Bytes] = []
    room = BLOCK
    for part in parts:
        rest = memoryview(part)
        while rest:
            piece, rest = rest[:room], rest[room:]
            block.append(piece)
            room -= len(piece)
            if not room:
                yield block
                block, room = [], BLOCK
    if block:
        yield block

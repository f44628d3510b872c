"""Remote files being written: in one request if they are small enough, else piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from torch_xla_ckpt.protocols import Bytes, Sink
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.remote_requests import Requests

BLOCK_BYTES = 16 << 20
"""Bytes that are sent in one request where a file needs several."""


class ObjectSink(Sink):
    """A file that is put in one request if it is small, and else piece by piece.

    Args:
        requests: the requests to the file's folder.
        name: the file's name.
        most: the largest file in bytes that is put in one request.
        stream: opens the file for writing piece by piece, if it is larger.
        unchanged: True if memory that is written stays unchanged until the file is closed, and the name is used once.
            Then nothing is copied, and nothing is sent before. The put is made again if its answer is late.
    """

    def __init__(
        self,
        requests: Requests,
        name: str,
        most: int,
        stream: Callable[[], Sink],
        *,
        unchanged: bool,
    ):
        self._requests = requests
        self._name = name
        self._most = most
        self._open_stream = stream
        self._unchanged = unchanged
        self._stream: Sink | None = None
        self._pieces: list[Bytes] = []
        self._size = 0

    def write(self, data: Bytes) -> None:
        if self._stream is not None:
            self._stream.write(data)
            return
        self._pieces.append(data if self._unchanged else bytes(data))
        self._size += len(data)
        if self._size > self._most and not self._unchanged:
            self._send_pieces()

    def close(self) -> None:
        if self._stream is None and self._size > self._most:
            self._send_pieces()
        if self._stream is not None:
            self._stream.close()
            return
        whole = self._joined()
        self._pieces = []  # the memory of the pieces is free from here on
        self._requests.put(self._name, whole, is_new=self._unchanged)

    def _send_pieces(self) -> None:
        self._stream = self._open_stream()
        for piece in self._pieces:
            self._stream.write(piece)
        self._pieces = []

    def _joined(self) -> Bytes:
        if self._requests.takes_only_bytes:
            return b"".join(self._pieces)
        # Other threads can run while numpy copies, but not while bytes are joined.
        whole, end = np.empty(self._size, dtype=np.uint8), 0
        for piece in self._pieces:
            whole[end : end + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            end += len(piece)
        return whole.data

    def abandon(self) -> None:
        self._pieces = []
        if self._stream is not None:
            self._stream.abandon()


class FileSink(Sink):
    """A remote file being written through fsspec, block by block.

    Args:
        requests: the requests to the file's folder.
        name: the file's name.
        replaces: whether there may be an older file of this name.
    """

    def __init__(self, requests: Requests, name: str, replaces: bool):
        self._requests = requests
        self._name = name
        self._replaces = replaces
        self._path = requests.full_path(name)
        self._owner = forks.Owner()
        self._uncounted = 0  # bytes since the last request was counted
        self._file = requests.within(f"write {name}", 0, requests.fs.open, self._path, "wb", block_size=BLOCK_BYTES)
        forks.renew_in_child(self, FileSink._forsake)

    def _forsake(self) -> None:
        """In a forked child: do not upload the parent's bytes when the file object is deleted, as fsspec would."""
        with suppress(Exception):
            self._file.closed = True

    def write(self, data: Bytes) -> None:
        self._requests.within(f"write {self._name}", len(data) + self._buffered(), self._file.write, data)
        self._uncounted += len(data)
        if self._uncounted >= BLOCK_BYTES:  # fsspec has sent a block
            self._requests.count(f"write {self._name}", self._uncounted)
            self._uncounted = 0

    def close(self) -> None:
        self._requests.count(f"write {self._name}", self._uncounted)
        self._requests.within(f"write {self._name}", self._buffered(), self._file.close)

    def abandon(self) -> None:
        if not self._owner.is_here:  # in a forked child: the save goes on in the parent
            return
        # Closing the file would publish it. An error here would hide the error that made the save fail.
        with suppress(Exception):
            self._requests.call(f"give up {self._name}", 0, self._file.discard)
        with suppress(Exception):
            self._file.closed = True
        if self._replaces:
            return
        with suppress(Exception):
            self._requests.call(f"remove {self._name}", 0, self._requests.fs.rm_file, self._path)

    def _buffered(self) -> int:
        """Return the most bytes that fsspec holds back, and sends with the next ones."""
        return int(getattr(self._file, "blocksize", 0) or 0)

"""Writing whole files to a store, each from its first byte to its last."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_xla_ckpt.exchange.bits import raw_bytes
from torch_xla_ckpt.exchange.casting import Casts
from torch_xla_ckpt.exchange.layout import OutFile, OutTensor
from torch_xla_ckpt.protocols import Folder, Sink


class StreamedFiles:
    """Files that are written one after the other. Each becomes visible when its last tensor was written.

    Args:
        folder: the folder of the files.
        files: the files.
        replaces: whether a file may replace an older one.
        casts: casts the elements, and counts those that overflow.

    Attributes:
        tensors: the tensors of all files, in the order in which they must be written.
    """

    def __init__(self, folder: Folder, files: Sequence[OutFile], *, replaces: bool, casts: Casts):
        self._folder = folder
        self._replaces = replaces
        self._casts = casts
        self._files = list(files)
        self._sink: Sink | None = None
        self._pieces: list[tuple[int, bytes]] = []
        self._left = 0  # tensors of the current file that are still to come
        self.tensors = [tensor for file in files for tensor in file.tensors]

    def write(self, tensor: OutTensor, data: torch.Tensor) -> None:
        """Write the next tensor.

        Args:
            tensor: the tensor.
            data: its elements in host memory, of any dtype.
        """
        file = self._files[0]
        if self._sink is None:
            self._sink = self._folder.create(file.name, replaces=self._replaces)
            self._pieces, self._left = list(file.pieces), len(file.tensors)
        while tensor.nbytes and self._pieces and self._pieces[0][0] < file.offsets[tensor.name]:
            self._sink.write(self._pieces.pop(0)[1])
        self._sink.write(raw_bytes(self._casts.cast(data, tensor)))
        self._left -= 1
        if not self._left:
            for _, piece in self._pieces:
                self._sink.write(piece)
            self._sink.close()
            self._sink = None
            self._files.pop(0)

    def abandon(self) -> None:
        """Give up the file that is being written. Files that were completed stay."""
        if self._sink is not None:
            self._sink.abandon()
            self._sink = None

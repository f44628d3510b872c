"""A file in memory that keeps only what is written, and knows the gaps that were skipped."""

from __future__ import annotations

import io
import itertools

from torch_xla_ckpt.protocols import Bytes


class SparseFile:
    """Takes what ``torch.save`` writes inside of ``torch.serialization.skip_data``, which seeks over tensors' bytes."""

    def __init__(self) -> None:
        self._position = 0
        self._written: list[tuple[int, bytes]] = []

    def write(self, data: Bytes) -> int:
        self._written.append((self._position, bytes(data)))
        self._position += len(data)
        return len(data)

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        self._position = position if whence == io.SEEK_SET else self._position + position
        return self._position

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        pass

    @property
    def end(self) -> int:
        """The size of the file in bytes."""
        return max((start + len(data) for start, data in self._written), default=0)

    def written(self) -> list[tuple[int, bytes]]:
        """Return positions and bytes of what was written, ascending; neighbours are joined."""
        joined: list[tuple[int, list[bytes]]] = []
        end = -1
        for start, data in sorted(self._written, key=lambda piece: piece[0]):
            if start == end:
                joined[-1][1].append(data)
            else:
                joined.append((start, [data]))
            end = start + len(data)
        return [(start, b"".join(parts)) for start, parts in joined]

    def gaps(self) -> list[tuple[int, int]]:
        """Return where each gap starts and stops, ascending."""
        pieces = self.written()
        return [(start + len(data), after) for (start, data), (after, _) in itertools.pairwise(pieces)]

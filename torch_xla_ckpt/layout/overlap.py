"""Search for the saved chunks that overlap a box."""

from __future__ import annotations

import numpy as np

from torch_xla_ckpt.layout.box import Box, BoxArray, Integers


class ChunkIndex:
    """A search index of a tensor's chunks.

    The chunks are sorted along the dimension with the most cuts. A query bisects to the window of chunks that can
    overlap the box in this dimension, and tests the window in one vectorised comparison. So the time of a query grows
    with the number of chunks found, for rows, columns and grids alike.

    Args:
        chunks: the saved chunks.
    """

    def __init__(self, chunks: BoxArray):
        self.chunks = chunks
        cuts = [len(np.unique(chunks.starts[:, dim])) for dim in range(chunks.ndim)]
        self._dim = int(np.argmax(cuts)) if cuts else None
        if self._dim is None:
            return
        self._order = np.argsort(chunks.starts[:, self._dim], kind="stable")
        self._sorted = chunks.take(self._order)
        self._low = np.ascontiguousarray(self._sorted.starts[:, self._dim])
        # The largest end up to each chunk. Chunks before the first end that passes the box's start cannot overlap it.
        self._high = np.maximum.accumulate(self._sorted.stops[:, self._dim])

    def overlaps(self, box: Box) -> tuple[Integers, BoxArray]:
        """Return the numbers of the chunks that overlap ``box``, ascending, and their intersections with it."""
        if self._dim is None:
            return self.chunks.clipped(box)
        start, size = box.offsets[self._dim], box.sizes[self._dim]
        window = slice(
            int(np.searchsorted(self._high, start, side="right")),
            int(np.searchsorted(self._low, start + size, side="left")),
        )
        hits, parts = self._sorted.take(window).clipped(box)
        numbers = self._order[window][hits]
        ascending = np.argsort(numbers)
        return numbers[ascending], parts.take(ascending)

"""Which saved chunks does a box overlap?"""

from __future__ import annotations

import numpy as np

from torch_xla_ckpt.layout.box import Box, BoxArray


class ChunkIndex:
    """An index of a tensor's chunks that answers overlap queries.

    The chunks are sorted along the dimension that is cut most. A query bisects to the window of chunks that can
    reach the box there and tests this window in one vectorised comparison, so that it costs about as much as it
    finds, for rows, columns and grids alike.
    """

    def __init__(self, chunks: BoxArray):
        self.chunks = chunks
        cuts = [len(np.unique(chunks.starts[:, dim])) for dim in range(chunks.ndim)]
        self._dim = int(np.argmax(cuts)) if cuts else None
        if self._dim is None:
            return
        self._order = np.argsort(chunks.starts[:, self._dim], kind="stable")
        self._sorted = BoxArray(chunks.starts[self._order], chunks.stops[self._order])
        self._low = np.ascontiguousarray(self._sorted.starts[:, self._dim])
        # The largest end so far: chunks before the first one that passes the box's start cannot reach it.
        self._high = np.maximum.accumulate(self._sorted.stops[:, self._dim])

    def overlaps(self, box: Box) -> list[tuple[int, Box]]:
        """The number of each chunk that shares elements with ``box``, and the region shared, in chunk order."""
        if self._dim is None:
            return [(number, box) for number in range(len(self.chunks))]
        start, size = box.offsets[self._dim], box.sizes[self._dim]
        window = slice(
            int(np.searchsorted(self._high, start, side="right")),
            int(np.searchsorted(self._low, start + size, side="left")),
        )
        low = np.array(box.offsets, dtype=np.int64)
        starts = np.maximum(self._sorted.starts[window], low)
        stops = np.minimum(self._sorted.stops[window], low + np.array(box.sizes, dtype=np.int64))
        hits = np.flatnonzero((starts < stops).all(axis=1))
        numbers = self._order[window][hits]
        rows = np.argsort(numbers)
        shared = zip(starts[hits][rows].tolist(), (stops - starts)[hits][rows].tolist())
        return [(number, Box(tuple(o), tuple(n))) for number, (o, n) in zip(numbers[rows].tolist(), shared)]

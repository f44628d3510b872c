"""Which saved chunks does a box overlap?"""

from __future__ import annotations

import numpy as np

from torch_xla_ckpt.layout.box import Box, BoxArray, Integers


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
        self._sorted = chunks.take(self._order)
        self._low = np.ascontiguousarray(self._sorted.starts[:, self._dim])
        # The largest end so far: chunks before the first one that passes the box's start cannot reach it.
        self._high = np.maximum.accumulate(self._sorted.stops[:, self._dim])

    def overlaps(self, box: Box) -> tuple[Integers, BoxArray]:
        """The numbers of the chunks that share elements with ``box``, ascending, and the regions shared."""
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

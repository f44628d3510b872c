"""Reuse of host memory between loads and between snapshots."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torch_xla_ckpt.runtime import forks

_LEAST_REUSED = 1 << 20  # bytes; smaller buffers are cheap to allocate


class Buffers:
    """Allocates host tensors, and reuses the memory of tensors that were released.

    New memory costs a page fault every few KiB, and page faults take longer than copying data into the memory. The
    kept memory, free or in use, never exceeds the most that was in use at one time.
    """

    def __init__(self) -> None:
        self._free: deque[Any] = deque()
        self._renew()
        forks.renew_in_child(self, Buffers._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a host tensor with undefined content."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LEAST_REUSED:
            return torch.empty(tuple(shape), dtype=dtype)
        memory = self._memory(nbytes)
        # The tensor holds this array, and so does a runtime that still uploads it. When both have released the array,
        # its memory is free.
        array = memory.view()
        weakref.finalize(array, self._free.append, memory).atexit = False
        return torch.from_numpy(array).view(dtype).view(tuple(shape))

    def _memory(self, nbytes: int) -> Any:
        """Return free memory of this size, or new memory for which as much free memory is dropped."""
        with self._lock:
            for _ in range(len(self._free)):
                memory = self._free.popleft()
                if memory.nbytes == nbytes:
                    return memory
                self._free.append(memory)
            dropped = 0
            while self._free and dropped < nbytes:
                dropped += self._free.popleft().nbytes
        return np.empty(nbytes, np.uint8)

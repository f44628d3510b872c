"""Host memory that is used again."""

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

# Smaller buffers are cheap to get.
_LEAST_BYTES = 1 << 20


class Buffers:
    """Hands out host tensors, and takes their memory back when nobody holds them any more.

    Memory that was never touched costs a page fault every few KiB, and those take longer than copying into it. All
    that is kept, in use or not, is never more than what was in use at some time.
    """

    def __init__(self) -> None:
        self._free: deque[Any] = deque()
        self._renew()
        forks.renew_in_child(self, Buffers._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with undefined content."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LEAST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        memory = self._memory(nbytes)
        # The tensor, and a runtime that still uploads it, hold this array; with the last of them it goes.
        held = memory.view()
        weakref.finalize(held, self._free.append, memory).atexit = False
        return torch.from_numpy(held).view(dtype).view(tuple(shape))

    def _memory(self, nbytes: int) -> Any:
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

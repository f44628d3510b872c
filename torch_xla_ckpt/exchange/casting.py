"""Casts of tensors on their way into files, and the finite values that a smaller range turns into infinite ones."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

import torch

from torch_xla_ckpt.exchange.layout import OutTensor

logger = logging.getLogger(__name__)

_SHOWN = 10  # names that a warning lists


class Casts:
    """The casts of one process.

    Attributes:
        overflowed: number of finite values that became infinite, by the tensor's name in the file.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.overflowed: Counter[str] = Counter()

    def cast(self, data: torch.Tensor, tensor: OutTensor) -> torch.Tensor:
        """Return elements of a tensor in the dtype of the file.

        Args:
            data: some of the elements, in the dtype of the source.
            tensor: the tensor.
        """
        result = data.to(tensor.dtype)
        if data.dtype != tensor.dtype and data.numel() and not _fits(data, tensor.dtype):
            number = int((result.isinf() & data.isfinite()).sum())
            if number:
                with self._lock:
                    self.overflowed[tensor.name] += number
        return result


def warn_of_overflow(overflowed: Mapping[str, int], dtype: torch.dtype | None) -> None:
    """Log a warning that names tensors with values outside of the range of their new dtype."""
    if overflowed:
        named = [f"{name} ({number:,})" for name, number in list(overflowed.items())[:_SHOWN]]
        more = f" and {len(overflowed) - _SHOWN} more" if len(overflowed) > _SHOWN else ""
        logger.warning(
            "finite values do not fit into %s and were written as infinite ones: %s%s. Export with a dtype of a larger "
            "range, such as torch.bfloat16, or without dtype=",
            dtype,
            ", ".join(named),
            more,
        )


def _fits(data: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all elements surely lie in the range of a dtype. NaN and infinite elements make it False."""
    limit = torch.finfo(dtype).max
    if torch.finfo(data.dtype).max <= limit:
        return True
    low, high = data.aminmax()
    return bool(-limit <= low.item() and high.item() <= limit)

"""Statistics of a tensor, computed piece by piece."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from torch_xla_ckpt.errors import CheckpointError

_AT_ONCE = 1 << 22  # elements that are converted to float64 together


def has_statistics(dtype: str) -> bool:
    """Return whether torch computes with a dtype, given its name."""
    try:
        torch.empty(0, dtype=getattr(torch, dtype)).double()
    except (AttributeError, TypeError, RuntimeError, NotImplementedError):
        return False
    return True


@dataclass(frozen=True)
class Statistics:
    """Statistics of the elements of a tensor. NaN and infinities count for no other number.

    Args:
        count: number of elements.
        min, max, mean, std: None if there is no finite element. Of complex numbers, those of their magnitudes. ``std``
            is that of the elements themselves, not of a sample.
        zeros, nans, infs: number of such elements.
    """

    count: int
    min: float | int | None
    max: float | int | None
    mean: float | None
    std: float | None
    zeros: int
    nans: int
    infs: int

    def __str__(self) -> str:
        if self.min is None:
            values = "no finite element"
        else:
            names = ("min", "max", "mean", "std")
            values = ", ".join(f"{name} {_shown(getattr(self, name))}" for name in names)
        odd = [f"{n:,} {what}" for n, what in ((self.zeros, "zeros"), (self.nans, "NaN"), (self.infs, "Inf")) if n]
        return ", ".join([values, *odd])


class Collector:
    """Collects the statistics of a tensor whose elements come in pieces.

    Args:
        key: the tensor's key, for errors.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._count = self._finite = self._zeros = self._nans = self._infs = 0
        self._mean = self._squares = 0.0
        self._min: float | int = math.inf
        self._max: float | int = -math.inf

    def add(self, tensor: torch.Tensor) -> None:
        """Add the elements of a host tensor.

        Raises:
            CheckpointError: torch cannot compute with the dtype.
        """
        for part in tensor.reshape(-1).split(_AT_ONCE):
            if part.numel():
                self._count += part.numel()
                self._add(part)

    def result(self) -> Statistics:
        """Return the statistics of all elements that were added."""
        found = self._finite > 0
        return Statistics(
            count=self._count,
            min=self._min if found else None,
            max=self._max if found else None,
            mean=self._mean if found else None,
            std=math.sqrt(self._squares / self._finite) if found else None,
            zeros=self._zeros,
            nans=self._nans,
            infs=self._infs,
        )

    def _add(self, part: torch.Tensor) -> None:
        if part.is_floating_point() or part.is_complex():
            numbers = self._floats(part)
            if not numbers.numel():
                return
            low, high = (float(one) for one in numbers.aminmax())
            doubles = numbers.double()
        else:  # numpy, because torch lacks most operations on unsigned integers
            integers = part.numpy()
            low, high = int(integers.min()), int(integers.max())
            doubles = torch.from_numpy(integers.astype(np.float64))
        self._zeros += doubles.numel() - int(doubles.count_nonzero())
        self._min, self._max = min(self._min, low), max(self._max, high)
        self._merge(doubles)

    def _floats(self, part: torch.Tensor) -> torch.Tensor:
        """Return the finite elements, or their magnitudes, and count the others."""
        try:
            if part.is_complex():
                part = part.to(torch.complex128).abs()
            elif part.itemsize < 4:
                part = part.float()
        except (RuntimeError, NotImplementedError) as error:
            raise CheckpointError(
                f"cannot compute statistics of {self._key!r}: torch {torch.__version__} does not convert {part.dtype}. "
                "Leave them out with --no-statistics, or statistics=False"
            ) from error
        low, high = part.aminmax()  # NaN if any element is NaN
        if low.isfinite() and high.isfinite():
            return part
        nans = int(part.isnan().sum())
        finite = part[part.isfinite()]
        self._nans += nans
        self._infs += part.numel() - nans - finite.numel()
        return finite

    def _merge(self, numbers: torch.Tensor) -> None:
        """Add finite doubles to mean and squared deviations, as Chan, Golub and LeVeque do (1979)."""
        variance, mean = (float(one) for one in torch.var_mean(numbers, correction=0))
        count = numbers.numel()
        delta, total = mean - self._mean, self._finite + count
        self._squares += variance * count + delta * delta * self._finite * count / total
        self._mean += delta * count / total
        self._finite = total


def _shown(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"

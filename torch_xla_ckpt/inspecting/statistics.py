"""Statistics of a tensor, computed piece by piece."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_AT_ONCE = 1 << 22  # elements that are converted to float64 together


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
    """Collects the statistics of a tensor whose elements come in pieces."""

    def __init__(self) -> None:
        self._count = self._finite = self._zeros = self._nans = self._infs = 0
        self._mean = self._squares = 0.0
        self._min: float | int = math.inf
        self._max: float | int = -math.inf

    def add(self, tensor: torch.Tensor) -> None:
        """Add the elements of a host tensor."""
        for part in tensor.reshape(-1).split(_AT_ONCE):
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
        self._count += part.numel()
        if not part.numel():
            return
        low: float | int
        high: float | int
        if part.is_floating_point() or part.is_complex():
            numbers = _doubles(part)
            nans, infs = np.isnan(numbers), np.isinf(numbers)
            self._nans += int(nans.sum())
            self._infs += int(infs.sum())
            numbers = numbers[~(nans | infs)]
            if not numbers.size:
                return
            low, high = float(numbers.min()), float(numbers.max())
        else:
            integers = part.numpy()
            low, high = int(integers.min()), int(integers.max())
            numbers = integers.astype(np.float64)
        self._zeros += int((numbers == 0).sum())
        self._min, self._max = min(self._min, low), max(self._max, high)
        self._merge(numbers)

    def _merge(self, numbers: npt.NDArray[np.float64]) -> None:
        """Add finite numbers to mean and squared deviations, as Chan, Golub and LeVeque do (1979)."""
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers near the largest double
            mean = float(numbers.mean())
            squares = float(np.square(numbers - mean).sum())
        delta, total = mean - self._mean, self._finite + numbers.size
        self._squares += squares + delta * delta * self._finite * numbers.size / total
        self._mean += delta * numbers.size / total
        self._finite = total


def _doubles(part: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return floating-point elements, or the magnitudes of complex ones, as numpy's float64."""
    if part.is_complex():
        part = part.to(torch.complex128).abs()
    return (part if part.itemsize >= 4 else part.float()).double().numpy()


def _shown(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"

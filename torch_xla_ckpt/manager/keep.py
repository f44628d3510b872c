"""What to keep: policies that are values, joined by ``|``.

    keep.Latest(3) | keep.Best(1, "loss", mode="min") | keep.Every(steps=1000)

A policy names, among the committed steps, those it wants and why. What no policy wants is deleted. The newest step is
kept whatever they say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal


@dataclass(frozen=True)
class Saved:
    """What is known of a committed step.

    Args:
        step: its number.
        time: of the commit, with a time zone; None where it is not recorded.
        metrics: that were given when it was saved.
        metadata: the user's.
    """

    step: int
    time: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Any = None


class Keep:
    """A policy of what to keep."""

    @property
    def needs_facts(self) -> bool:
        """Whether it looks at more of a step than its number, which takes reading every step's manifest once."""
        return True

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        """The steps to keep, with the reason.

        Args:
            saved: the committed steps, ascending.
            now: the time, with a time zone.
        """
        raise NotImplementedError

    def __or__(self, other: KeepLike) -> Keep:
        return AnyOf((*_flat(self), *_flat(policy(other))))

    def __ror__(self, other: KeepLike) -> Keep:
        return policy(other) | self


KeepLike = Keep | Callable[[Saved], bool]


@dataclass(frozen=True)
class AnyOf(Keep):
    """What any of several policies wants."""

    policies: tuple[Keep, ...]

    @property
    def needs_facts(self) -> bool:
        return any(one.needs_facts for one in self.policies)

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        reasons: dict[int, str] = {}
        for one in self.policies:
            for step, reason in one.wanted(saved, now).items():
                reasons[step] = f"{reasons[step]}; {reason}" if step in reasons else reason
        return reasons


@dataclass(frozen=True)
class All(Keep):
    """Everything."""

    needs_facts = False

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        return {one.step: "all are kept" for one in saved}


@dataclass(frozen=True)
class Latest(Keep):
    """The ``n`` highest steps."""

    n: int

    needs_facts = False

    def __post_init__(self) -> None:
        _require(self.n > 0, "n must be positive")

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        return {one.step: f"one of the latest {self.n}" for one in saved[-self.n :]}


@dataclass(frozen=True)
class Best(Keep):
    """The ``n`` steps with the best value of a metric; of equal ones the later. NaN is never good."""

    n: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _require(self.n > 0, "n must be positive")
        _require(self.mode in ("min", "max"), 'mode must be "min" or "max"')

    def ranked(self, saved: Sequence[Saved]) -> list[Saved]:
        """Those that have the metric, best first."""
        have = [one for one in saved if not math.isnan(one.metrics.get(self.metric, math.nan))]
        sign = 1 if self.mode == "min" else -1
        return sorted(have, key=lambda one: (sign * one.metrics[self.metric], -one.step))

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        best = self.ranked(saved)[: self.n]
        return {one.step: f"one of the best {self.n} by {self.metric} ({one.metrics[self.metric]:g})" for one in best}


@dataclass(frozen=True)
class Every(Keep):
    """Steps that are multiples of ``steps``, or the first in every ``hours``."""

    steps: int | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        _require((self.steps is None) != (self.hours is None), "give either steps or hours")
        _require((self.steps or self.hours or 0) > 0, "steps and hours must be positive")

    @property
    def needs_facts(self) -> bool:
        return self.steps is None

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        if self.steps is not None:
            return {one.step: f"a multiple of {self.steps}" for one in saved if one.step % self.steps == 0}
        assert self.hours is not None
        reasons: dict[int, str] = {}
        last: datetime | None = None
        for one in saved:
            if one.time is None:
                reasons[one.step] = "its time is not known"
            elif last is None or one.time - last >= timedelta(hours=self.hours):
                reasons[one.step] = f"the first in {self.hours:g} hours"
                last = one.time
        return reasons


@dataclass(frozen=True)
class Newer(Keep):
    """Steps younger than a ``timedelta``, or committed after a ``datetime`` (which needs a time zone)."""

    than: timedelta | datetime

    def __post_init__(self) -> None:
        _require(not isinstance(self.than, datetime) or self.than.tzinfo is not None, "the datetime needs a time zone")

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        bound = self.than if isinstance(self.than, datetime) else now - self.than
        newer = [one for one in saved if one.time is None or one.time > bound]
        return {one.step: "its time is not known" if one.time is None else f"newer than {self.than}" for one in newer}


@dataclass(frozen=True)
class Where(Keep):
    """Steps for which a function is true."""

    function: Callable[[Saved], bool]

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        name = getattr(self.function, "__name__", "a function")
        return {one.step: f"{name} wants it" for one in saved if self.function(one)}


def policy(like: KeepLike) -> Keep:
    """A policy, or a function of ``Saved`` as one.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(like, Keep):
        return like
    if callable(like):
        return Where(like)
    raise TypeError(f"keep= takes policies such as keep.Latest(3), or a function, not {like!r}")


def now() -> datetime:
    return datetime.now(timezone.utc)


def _flat(one: Keep) -> tuple[Keep, ...]:
    return one.policies if isinstance(one, AnyOf) else (one,)


def _require(fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(what)

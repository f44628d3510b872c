"""Retention policies, which decide what to keep. They are values, joined by ``|``.

    keep.Latest(3) | keep.Best(1, "loss", mode="min") | keep.Every(steps=1000)

A policy returns the steps to keep, each with a reason. A step that no policy keeps is deleted. The newest step always
stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal


@dataclass(frozen=True)
class Saved:
    """A committed step, as retention policies see it.

    Args:
        step: the step's number.
        time: when the step was committed, with a time zone; None if it is not recorded.
        metrics: the metrics that were given to the save.
        metadata: the metadata that was given to the save.
    """

    step: int
    time: datetime | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Any = None


class Keep:
    """A retention policy: decides which steps to keep."""

    @property
    def needs_facts(self) -> bool:
        """True if the policy looks at more than step numbers. Then the manager reads each step's manifest once."""
        return True

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        """Return the steps to keep, each with a reason.

        Args:
            saved: the committed steps, ascending.
            now: the current time, with a time zone.
        """
        raise NotImplementedError

    def __or__(self, other: KeepLike) -> Keep:
        return AnyOf((*_flat(self), *_flat(policy(other))))

    def __ror__(self, other: KeepLike) -> Keep:
        return policy(other) | self


KeepLike = Keep | Callable[[Saved], bool]


@dataclass(frozen=True)
class AnyOf(Keep):
    """Keep what any of several policies keeps."""

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
    """Keep all steps."""

    needs_facts = False

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        return {one.step: "all are kept" for one in saved}


@dataclass(frozen=True)
class Latest(Keep):
    """Keep the ``n`` highest steps."""

    n: int

    needs_facts = False

    def __post_init__(self) -> None:
        _require(self.n > 0, "n must be positive")

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        return {one.step: f"one of the latest {self.n}" for one in saved[-self.n :]}


@dataclass(frozen=True)
class Best(Keep):
    """Keep the ``n`` steps with the best value of a metric. Of equal steps keep the later.

    NaN and infinities are ignored. While no step has a finite value of the metric, the manager deletes nothing.
    """

    n: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _require(self.n > 0, "n must be positive")
        _require(self.mode in ("min", "max"), 'mode must be "min" or "max"')

    def ranked(self, saved: Sequence[Saved]) -> list[Saved]:
        """Return the steps that have a finite value of the metric, best first."""
        have = [one for one in saved if math.isfinite(one.metrics.get(self.metric, math.nan))]
        sign = 1 if self.mode == "min" else -1
        return sorted(have, key=lambda one: (sign * one.metrics[self.metric], -one.step))

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        best = self.ranked(saved)[: self.n]
        return {one.step: f"one of the best {self.n} by {self.metric} ({one.metrics[self.metric]:g})" for one in best}


@dataclass(frozen=True)
class Every(Keep):
    """Keep steps that are multiples of ``steps``, or the first step in every ``hours``.

    If a step is older than the one kept before it, because a clock was wrong, the hours begin anew with it.
    """

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
            elif last is None or not timedelta() <= one.time - last < timedelta(hours=self.hours):
                reasons[one.step] = f"the first in {self.hours:g} hours"
                last = one.time
        return reasons


@dataclass(frozen=True)
class Newer(Keep):
    """Keep steps younger than a ``timedelta``, or committed after a ``datetime`` (which needs a time zone)."""

    than: timedelta | datetime

    def __post_init__(self) -> None:
        _require(not isinstance(self.than, datetime) or self.than.tzinfo is not None, "the datetime needs a time zone")

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        bound = self.than if isinstance(self.than, datetime) else now - self.than
        newer = [one for one in saved if one.time is None or one.time > bound]
        return {one.step: "its time is not known" if one.time is None else f"newer than {self.than}" for one in newer}


@dataclass(frozen=True)
class Where(Keep):
    """Keep steps for which a function is true."""

    function: Callable[[Saved], bool]

    def wanted(self, saved: Sequence[Saved], now: datetime) -> Mapping[int, str]:
        name = getattr(self.function, "__name__", "a function")
        return {one.step: f"{name} wants it" for one in saved if self.function(one)}


def policy(like: KeepLike) -> Keep:
    """Return ``like`` as a policy; a function of ``Saved`` becomes ``Where``.

    Raises:
        TypeError: ``like`` is neither a policy nor a function.
    """
    if isinstance(like, Keep):
        return like
    if callable(like) and not isinstance(like, type):
        return Where(like)
    raise TypeError(f"keep= takes policies such as keep.Latest(3), or a function, not {like!r}")


def joined(keep: KeepLike | None, max_to_keep: int | None) -> Keep:
    """Return one policy for a manager's options ``keep`` and ``max_to_keep``."""
    policies = () if keep is None else _flat(policy(keep))
    if max_to_keep:
        policies = (*policies, Latest(max_to_keep))
    return AnyOf(policies) if policies else All()


def now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(timezone.utc)


def _flat(one: Keep) -> tuple[Keep, ...]:
    return one.policies if isinstance(one, AnyOf) else (one,)


def _require(is_valid: bool, rule: str) -> None:
    if not is_valid:
        raise ValueError(rule)

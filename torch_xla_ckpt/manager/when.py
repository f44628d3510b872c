"""When to save: policies that are values, joined by ``|``.

    when.Every(steps=100) | when.First() | when.OnPreemption()

Every process must come to the same answer, so a policy looks at what all of them know. Functions have to as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Now:
    """What a policy may look at; the same in every process.

    Args:
        step: that has been reached.
        last: step that was saved before, by this program or an earlier one of the run; None if there is none.
        seconds: since this program began to save that, or began; on the clock of rank 0.
        preempted: whether the machine is about to be taken away.
    """

    step: int
    last: int | None
    seconds: float
    preempted: bool


class When:
    """A policy of when to save."""

    def due(self, now: Now) -> bool:
        """Whether to save this step."""
        raise NotImplementedError

    def __or__(self, other: WhenLike) -> When:
        return AnyOf((*_flat(self), *_flat(policy(other))))

    def __ror__(self, other: WhenLike) -> When:
        return policy(other) | self


WhenLike = When | Callable[[Now], bool]


@dataclass(frozen=True)
class AnyOf(When):
    """When any of several policies says so."""

    policies: tuple[When, ...]

    def due(self, now: Now) -> bool:
        return any(one.due(now) for one in self.policies)


@dataclass(frozen=True)
class Every(When):
    """At multiples of ``steps``, or when the last save began ``seconds`` ago."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None) or (self.steps or self.seconds or 0) <= 0:
            raise ValueError("give either steps or seconds, and a positive number")

    def due(self, now: Now) -> bool:
        if self.steps is not None:
            return now.step % self.steps == 0
        assert self.seconds is not None
        return now.seconds >= self.seconds


@dataclass(frozen=True, init=False)
class At(When):
    """At these steps."""

    steps: frozenset[int]

    def __init__(self, steps: Collection[int]):
        object.__setattr__(self, "steps", frozenset(steps))

    def due(self, now: Now) -> bool:
        return now.step in self.steps


@dataclass(frozen=True)
class OnPreemption(When):
    """When the machine is about to be taken away."""

    def due(self, now: Now) -> bool:
        return now.preempted


@dataclass(frozen=True)
class First(When):
    """The first step of a run that has none yet."""

    def due(self, now: Now) -> bool:
        return now.last is None


@dataclass(frozen=True)
class Where(When):
    """When a function is true."""

    function: Callable[[Now], bool]

    def due(self, now: Now) -> bool:
        return bool(self.function(now))


def policy(like: WhenLike) -> When:
    """A policy, or a function of ``Now`` as one.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(like, When):
        return like
    if callable(like):
        return Where(like)
    raise TypeError(f"when= takes policies such as when.Every(steps=100), or a function, not {like!r}")


def _flat(one: When) -> tuple[When, ...]:
    return one.policies if isinstance(one, AnyOf) else (one,)

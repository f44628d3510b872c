"""Policies that decide when to save. They are values, joined by ``|``.

    when.Every(steps=100) | when.First() | when.OnPreemption()

Every rank must come to the same answer. So a policy looks only at ``Now``, which is the same on all ranks, and so must
a function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Now:
    """What a policy may look at; the same on every rank.

    Args:
        step: the step that training has reached.
        last: the last step that was saved, by this program or an earlier one of the run; None if there is none.
        seconds: seconds since this program began its last save, or since it started; on the clock of rank 0.
        preempted: True if preemption is to be expected and no step has been saved because of it.
        saving: True if a save is under way on any rank.
        blocked: seconds for which the last call of the same method, ``save`` or ``save_async``, held up the slowest
            rank; 0 before the first call.
    """

    step: int
    last: int | None
    seconds: float
    preempted: bool
    saving: bool = False
    blocked: float = 0.0


class When:
    """A policy that decides when to save."""

    def due(self, now: Now) -> bool:
        """Return whether to save this step."""
        raise NotImplementedError

    def __or__(self, other: WhenLike) -> When:
        return AnyOf((*_flat(self), *_flat(policy(other))))

    def __ror__(self, other: WhenLike) -> When:
        return policy(other) | self


WhenLike = When | Callable[[Now], bool]


@dataclass(frozen=True)
class AnyOf(When):
    """Save when any of several policies wants to."""

    policies: tuple[When, ...]

    def due(self, now: Now) -> bool:
        return any(one.due(now) for one in self.policies)


@dataclass(frozen=True)
class Every(When):
    """Save at multiples of ``steps``, or when the last save began ``seconds`` ago."""

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
    """Save at these steps."""

    steps: frozenset[int]

    def __init__(self, steps: Collection[int]):
        object.__setattr__(self, "steps", frozenset(steps))

    def due(self, now: Now) -> bool:
        return now.step in self.steps


@dataclass(frozen=True)
class OnPreemption(When):
    """Save once when preemption is to be expected."""

    def due(self, now: Now) -> bool:
        return now.preempted


@dataclass(frozen=True)
class First(When):
    """Save the first step of a run that has no step yet."""

    def due(self, now: Now) -> bool:
        return now.last is None


@dataclass(frozen=True)
class Idle(When):
    """Save whenever no save is under way and training can afford another copy of the state.

    A failure then costs about the time of one save. Orbax calls this continuous checkpointing.

    Args:
        seconds: the least time between the beginnings of two saves. Default: 10.
        blocking: the largest share of the training time that saves may block. If the last save blocked training for
            0.1 seconds, the default of 0.01 waits 10 seconds. An async save is compared with the last async save.

    Raises:
        ValueError: ``seconds`` is negative, or ``blocking`` is not above 0 and at most 1.
    """

    seconds: float = 10.0
    blocking: float = 0.01

    def __post_init__(self) -> None:
        if not self.seconds >= 0 or not 0 < self.blocking <= 1:
            raise ValueError("give seconds that are not negative, and blocking as a share above 0 and at most 1")

    def due(self, now: Now) -> bool:
        return not now.saving and now.seconds >= max(self.seconds, now.blocked / self.blocking)


@dataclass(frozen=True)
class Where(When):
    """Save when a function is true."""

    function: Callable[[Now], bool]

    def due(self, now: Now) -> bool:
        return bool(self.function(now))


def policy(like: WhenLike) -> When:
    """Return ``like`` as a policy; a function of ``Now`` becomes ``Where``.

    Raises:
        TypeError: ``like`` is neither a policy nor a function.
    """
    if isinstance(like, When):
        return like
    if callable(like) and not isinstance(like, type):
        return Where(like)
    raise TypeError(f"when= takes policies such as when.Every(steps=100), or a function, not {like!r}")


def joined(when: WhenLike | None, save_interval: int | None, on_preemption: bool) -> When:
    """Return one policy for a manager's options ``when``, ``save_interval`` and ``chkpt_on_preemption``."""
    policies = [] if when is None else [policy(when)]
    if save_interval is not None:
        policies.append(Every(steps=save_interval))
    if on_preemption:
        policies.append(OnPreemption())
    return AnyOf(tuple(policies))


def _flat(one: When) -> tuple[When, ...]:
    return one.policies if isinstance(one, AnyOf) else (one,)

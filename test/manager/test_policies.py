"""Policies as values: which steps ``keep`` keeps, and at which steps ``when`` saves."""

import dataclasses
import math
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_ckpt.manager import keep, when
from torch_xla_ckpt.manager.keep import Saved
from torch_xla_ckpt.manager.when import Now

START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def saved(*steps, minutes=1, **metrics):
    """Steps that were committed a minute apart, with metrics."""
    return [
        Saved(step, START + timedelta(minutes=minutes * n), {name: values[n] for name, values in metrics.items()})
        for n, step in enumerate(steps)
    ]


def kept(policy, facts, now=START + timedelta(days=1)):
    return sorted(policy.wanted(facts, now))


def test_latest_keeps_the_highest_steps():
    assert kept(keep.Latest(2), saved(1, 5, 9)) == [5, 9]
    assert kept(keep.Latest(7), saved(1, 5)) == [1, 5]
    assert kept(keep.Latest(1), []) == []


def test_best_keeps_the_later_of_equal_steps_and_ignores_nan():
    facts = saved(1, 2, 3, 4, loss=[0.5, math.nan, 0.5, 0.9])
    assert kept(keep.Best(1, "loss"), facts) == [3]
    assert kept(keep.Best(2, "loss", "max"), facts) == [3, 4]
    assert kept(keep.Best(9, "loss"), facts) == [1, 3, 4]
    assert kept(keep.Best(1, "accuracy"), facts) == []


def test_every_keeps_multiples_of_steps_or_one_step_in_some_hours():
    assert kept(keep.Every(steps=100), saved(0, 50, 100, 150, 200)) == [0, 100, 200]
    assert kept(keep.Every(hours=1), saved(*range(6), minutes=25)) == [0, 3]
    assert kept(keep.Every(hours=1), [Saved(4)]) == [4]  # its time is not known


@pytest.mark.parametrize("wrong", [timedelta(hours=30), timedelta(days=-400)])
def test_every_keeps_steps_after_a_clock_was_wrong(wrong):
    times = [START + timedelta(hours=n) + (wrong if n < 3 else timedelta()) for n in range(13)]
    found = kept(keep.Every(hours=4), [Saved(step, time) for step, time in enumerate(times)])
    assert found == [0, 3, 7, 11]


def test_newer_keeps_steps_after_a_time():
    facts = saved(1, 2, 3, minutes=60)
    assert kept(keep.Newer(timedelta(hours=1)), facts, START + timedelta(hours=2, minutes=30)) == [3]
    assert kept(keep.Newer(START + timedelta(minutes=30)), facts) == [2, 3]
    with pytest.raises(ValueError, match="time zone"):
        keep.Newer(datetime(2026, 1, 1))


def test_policies_and_functions_can_be_joined_in_any_order():
    facts = saved(*range(1, 11), loss=[abs(n - 4) for n in range(1, 11)])
    policy = keep.Latest(2) | keep.Best(1, "loss") | (lambda one: one.step == 7)
    assert kept(policy, facts) == [4, 7, 9, 10]
    assert kept((lambda one: one.step == 1) | keep.Latest(1), facts) == [1, 10]
    assert "latest 2" in policy.wanted(facts, START)[10] and "by loss" in policy.wanted(facts, START)[4]
    assert kept(keep.All(), facts) == list(range(1, 11))
    assert keep.Latest(3) == keep.Latest(3) and len({keep.Latest(3), keep.Latest(3)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        keep.Latest(3).n = 4


@given(st.lists(st.integers(0, 300), unique=True), st.integers(1, 5), st.integers(1, 50))
def test_policy_keeps_the_same_steps_after_the_others_are_deleted(steps, n, every):
    """Retention runs after every save. It must not delete, without a new step, what it kept before."""
    facts = saved(*sorted(steps), loss=[step % 17 for step in sorted(steps)])
    policy = keep.Latest(n) | keep.Best(n, "loss") | keep.Every(steps=every) | keep.Every(hours=0.1)
    first = kept(policy, facts)
    assert kept(policy, [one for one in facts if one.step in first]) == first


@pytest.mark.parametrize(
    "make",
    [
        lambda: keep.Latest(0),
        lambda: keep.Best(0, "loss"),
        lambda: keep.Best(1, "loss", "least"),
        lambda: keep.Every(),
        lambda: keep.Every(steps=1, hours=1),
        lambda: keep.Every(hours=-1),
        lambda: when.Every(),
        lambda: when.Every(steps=0),
        lambda: when.Every(steps=2, seconds=2),
        lambda: when.Idle(seconds=-1),
        lambda: when.Idle(seconds=float("nan")),
        lambda: when.Idle(blocking=0),
        lambda: when.Idle(blocking=2),
    ],
)
def test_impossible_policies_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_values_that_are_not_policies_are_refused():
    with pytest.raises(TypeError, match=r"keep.Latest\(3\)"):
        keep.Latest(1) | 3
    with pytest.raises(TypeError, match=r"when\.Every"):
        when.First() | 3


def test_when_policies_decide_from_step_time_and_preemption():
    now = Now(step=20, last=10, seconds=30.0, preempted=False)
    later = dataclasses.replace
    assert when.Every(steps=10).due(now) and not when.Every(steps=3).due(now)
    assert when.Every(seconds=30).due(now) and not when.Every(seconds=31).due(now)
    assert when.At([20, 40]).due(now) and not when.At([21]).due(now) and when.At([1, 2]) == when.At({2, 1})
    assert not when.OnPreemption().due(now) and when.OnPreemption().due(later(now, preempted=True))
    assert not when.First().due(now) and when.First().due(later(now, last=None))
    either = when.At([5]) | (lambda now: now.step == 20) | when.First()
    assert either.due(now) and not either.due(later(now, step=21))
    assert ((lambda now: True) | when.First()).due(now)


def test_idle_is_due_when_no_save_runs_and_the_last_one_cost_little():
    now = Now(step=20, last=10, seconds=30.0, preempted=False, saving=False, blocked=0.2)
    later = dataclasses.replace
    assert when.Idle().due(now) and not when.Idle().due(later(now, saving=True))
    assert when.Idle(seconds=30).due(now) and not when.Idle(seconds=31).due(now)
    assert not when.Idle(seconds=0).due(later(now, seconds=19.9)) and when.Idle(seconds=0).due(later(now, seconds=20.0))
    assert when.Idle(seconds=0, blocking=1).due(later(now, seconds=0.2))

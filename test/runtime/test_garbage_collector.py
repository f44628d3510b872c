"""The garbage collector rests during saves and loads, and is afterwards as the program left it."""

import collections
import contextlib
import gc
import threading

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_xla_ckpt as xc
from support.dcp_storage import load, save
from torch_xla_ckpt.runtime.collector import without_collector


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collector(request):
    """Whether the program had it on."""
    was = gc.isenabled()
    gc.enable() if request.param else gc.disable()
    threshold = gc.get_threshold()
    yield request.param
    assert gc.get_threshold() == threshold
    gc.enable() if was else gc.disable()


def collects():
    """Whether the collector is on, and would run at some time."""
    return gc.isenabled() and 0 < gc.get_threshold()[0] < 1 << 30


class Watching:
    """A part of a state dict that sees whether the collector is on."""

    def __init__(self):
        self.seen = []

    def state_dict(self):
        self.seen.append(collects())
        return {"t": torch.ones(2)}

    def load_state_dict(self, state):
        self.seen.append(collects())


def test_the_collector_rests_during_a_checkpoint_and_is_afterwards_as_before(collector, tmp_path):
    part = Watching()
    xc.save({"part": part}, tmp_path)
    assert collects() is collector
    xc.load({"part": part}, tmp_path)
    assert collects() is collector
    assert part.seen and not any(part.seen)
    save({"part": part}, tmp_path)
    load({"part": part}, tmp_path)
    assert collects() is collector


def test_the_collector_is_as_before_when_a_checkpoint_fails(collector, tmp_path):
    with pytest.raises(xc.CheckpointError):
        xc.load({"t": torch.ones(2)}, tmp_path / "nothing")
    assert collects() is collector
    (tmp_path / "file").write_text("")
    with pytest.raises(xc.CheckpointError):
        xc.save({"t": torch.ones(2)}, tmp_path / "file")
    assert collects() is collector
    with pytest.raises(ValueError):
        xc.save({"t": torch.ones(2)})
    assert collects() is collector
    with pytest.raises(CheckpointException):
        save({"s": torch.eye(2).to_sparse()}, tmp_path / "c")
    assert collects() is collector


def test_the_collector_rests_until_the_last_of_several_threads_is_done(collector):
    begun, ended = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]
    seen = collections.Counter()

    @without_collector
    def work(number):
        begun[number].set()
        ended[number].wait(10)
        seen[collects()] += 1
        if number:
            raise ValueError

    def run(number):
        with contextlib.suppress(ValueError):
            work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for event in begun:
        assert event.wait(10)
    for event, thread in zip(ended, threads):
        assert not collects()
        event.set()
        thread.join()
    assert collects() is collector and seen == {False: 2}


@pytest.mark.parametrize("setting", [gc.disable, lambda: gc.set_threshold(0), lambda: gc.set_threshold(99_999, 7, 8)])
def test_what_the_program_sets_while_the_collector_rests_is_not_undone(setting):
    """During an async save it cannot know of the pause, and may turn the collector off for its own reasons."""
    threshold, inner = gc.get_threshold(), without_collector(lambda: None)

    @without_collector
    def work():
        inner()
        setting()
        inner()
        return gc.isenabled(), gc.get_threshold()

    try:
        set_by_program = work()
        assert gc.isenabled() == set_by_program[0]
        expected = threshold if setting is gc.disable else set_by_program[1]
        assert gc.get_threshold() == expected
    finally:
        gc.enable()
        gc.set_threshold(*threshold)

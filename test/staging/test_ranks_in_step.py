"""Errors of single ranks in async saves: no rank waits for another one, and later saves hold the state of one step."""

import random
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support import rank_processes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TIMEOUT = timedelta(seconds=20)  # a rank that is out of step fails by then


class Broken:
    """A ``Stateful`` whose state cannot be read."""

    def __init__(self, text):
        self.text = text

    def state_dict(self):
        raise OSError(self.text)

    def load_state_dict(self, state):
        raise AssertionError


class Unpickled:
    """An object that cannot be pickled."""

    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        raise OSError(self.text)


class Pathless:
    """A path object that has no path."""

    def __init__(self, text):
        self.text = text

    def __fspath__(self):
        raise TypeError(self.text)


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def begin(way, state, path, stager, *, failure=None, kind=None, group=None):
    """Begin an async save that fails on this rank, if ``kind`` says so."""
    writer = xc.ShardWriter(path, sync=False)
    if kind == "objects":
        state = {**state, "bad": Unpickled(failure)}
    if kind == "tensors":
        state = {**state, "bad": {failure: torch.ones(2, device="meta")}}
    if kind == "stateful":
        state = {**state, "bad": Broken(failure)}
    if kind == "write":
        writer.write_data = raising(OSError(failure))
    if kind == "announce":
        writer.announce = raising(OSError(failure))
    if kind == "slot":
        found, stager._wait_for_slot = stager._wait_for_slot, raising(KeyboardInterrupt(failure))
    try:
        if way == "dcp":
            planner = xc.SPMDSavePlanner()
            return dcp.async_save(
                state, storage_writer=writer, planner=planner, async_stager=stager, process_group=group
            ).upload_completion
        if kind == "path":
            return xc.async_save(state, Pathless(failure), stager=stager).upload_completion
        return xc.async_save(state, storage_writer=writer, stager=stager).upload_completion
    finally:
        if kind == "slot":
            stager._wait_for_slot = found


KINDS = {
    "xc": ("objects", "tensors", "stateful", "write", "announce", "slot", "path"),
    "dcp": ("objects", "tensors", "write", "slot"),
}


def failures_in_any_order(rank, world, folder, way, max_pending, has_group):
    """Failures of every kind on random ranks, while each rank reads the futures that it wants to."""
    together, own = random.Random(7), random.Random(rank)
    group = dist.new_group(backend="gloo", timeout=TIMEOUT) if has_group else None
    failing, seen = {}, []

    def note(error):
        assert isinstance(error, (OSError, TypeError, KeyboardInterrupt, xc.CheckpointError)), repr(error)
        seen.append(str(error))

    stager = xc.SPMDStager("host", max_pending=max_pending, timeout=TIMEOUT)
    begin(way, {"n": -1}, Path(folder) / "first", stager, group=group).result(60)  # there is a group from now on
    for number in range(40):
        future, kind = None, None
        if together.random() < 0.5:
            failing[number] = together.randrange(world)
            kind = together.choice(KINDS[way])
        mine = kind if failing.get(number) == rank else None
        state = {"t": torch.full((3,), number), "n": number, f"own{rank}": number}
        try:
            future = begin(
                way, state, Path(folder) / str(number), stager, failure=f"failure-{number}.", kind=mine, group=group
            )
        except (Exception, KeyboardInterrupt) as error:
            note(error)
        if future is not None and own.random() < 0.4:
            note(error) if (error := future.exception(60)) is not None else None
    for _ in range(2):  # an error that the last call raised, and an error of the last call itself
        try:
            stager.wait()
        except xc.CheckpointError as error:
            note(error)
    stager.close()
    dist.barrier()
    for number in range(40):
        path = Path(folder) / str(number)
        if number not in failing:
            found = {"t": torch.zeros(3), "n": None, **{f"own{one}": None for one in range(world)}}
            xc.load(found, path, no_dist=True)
            assert found.pop("t").eq(number).all() and set(found.values()) == {number}, (number, found)
            continue
        assert not (path / ".metadata").exists()
        texts = [text for text in seen if f"failure-{number}." in text]
        if max_pending == 1:  # a call raises the errors of several saves as one, and logs the others
            assert texts, f"rank {rank} never learnt of failure {number}: {seen}"
        assert failing[number] == rank or all(f"rank {failing[number]}: " in text for text in texts), texts


@pytest.mark.parametrize(
    "way, world, max_pending, has_group",
    [("xc", 3, 1, False), ("xc", 2, 3, False), ("dcp", 3, 1, False), ("dcp", 2, 3, False), ("dcp", 2, 1, True)],
)
def test_no_order_of_failures_mixes_steps_or_loses_an_error(tmp_path, way, world, max_pending, has_group):
    rank_processes.run(failures_in_any_order, tmp_path, world, way, max_pending, has_group)


def first_call_fails(rank, world, folder):
    """The first call makes the group of the ranks, also on the rank that fails."""
    for way in KINDS:
        for kind in [kind for kind in KINDS[way] if kind != "slot"]:  # the first call has nothing to wait for
            path = Path(folder) / f"{way}-{kind}"
            with xc.SPMDStager("host", timeout=TIMEOUT) as stager:
                arguments = {"failure": "failure-0", "kind": kind if rank == 1 else None}
                try:
                    future = begin(way, {"n": 1}, path, stager, **arguments)
                except (OSError, TypeError, xc.CheckpointError) as error:
                    assert rank == 1 and "failure-0" in str(error), error
                else:
                    with pytest.raises(xc.CheckpointError, match=r"rank 1: .*failure-0"):
                        future.result(60)
                begin(way, {"n": 2}, path, stager).result(60)
            dist.barrier()


def test_a_first_save_that_fails_on_one_rank_fails_on_all(tmp_path):
    rank_processes.run(first_call_fails, tmp_path, 2)


def own_stagers_fail(rank, world, folder):
    """Calls without a stager: one rank passes no path."""
    if rank == 0:
        with pytest.raises(ValueError, match="there is no path"):
            xc.async_save({"n": 1})
    else:
        xc.async_save({"n": 1}, f"{folder}/one")
        with pytest.raises(xc.CheckpointError, match=r"earlier async save failed: .*rank 0: .*no path.* has begun"):
            xc.async_save({"n": 2}, f"{folder}/two")
    if rank == 0:
        xc.async_save({"n": 2}, f"{folder}/two")
    xc.async_save({"n": 3}, f"{folder}/three").result(60)
    found = {"n": 0}
    xc.load(found, f"{folder}/two", no_dist=True)
    assert found["n"] == 2


def test_the_error_of_a_call_without_a_stager_reaches_all_ranks(tmp_path):
    rank_processes.run(own_stagers_fail, tmp_path, 2)


def alone_in_a_group(rank, world, folder):
    """With ``no_dist``, a rank that cannot copy its state concerns nobody."""
    stager = xc.SPMDStager("host", timeout=TIMEOUT)
    for number in range(3):
        state = {"n": number, "bad": threading.Lock() if number == rank else 1}
        options = {"checkpoint_id": f"{folder}/{rank}-{number}", "planner": xc.SPMDSavePlanner(), "no_dist": True}
        if number == rank:
            with pytest.raises(xc.CheckpointError, match="'bad'"):
                dcp.async_save(state, async_stager=stager, **options)
        elif rank == 0 or number:  # the ranks make different calls
            dcp.async_save(state, async_stager=stager, **options).upload_completion.result(60)
    stager.close()


def test_saves_of_single_ranks_do_not_wait_for_others(tmp_path):
    rank_processes.run(alone_in_a_group, tmp_path, 2)

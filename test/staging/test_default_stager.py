"""``async_save`` without a stager: one stager for the process, which reports errors and is closed at the end."""

import concurrent.futures

import pytest
import torch

import torch_xla_ckpt as xc
from support import hosts, interpreters
from support.meshes import holds, mesh, put
from torch_xla_ckpt.staging import default_stager

pytestmark = pytest.mark.filterwarnings("ignore")


def value_of(path):
    state = {"n": None}
    xc.load(state, path)
    return state["n"]


def test_saves_without_a_stager_hold_the_state_of_the_call(tmp_path):
    host = torch.rand(16, 8)
    state = {"t": put(host, mesh((4, 2)), ("a", "b")), "n": 1}
    handle = xc.async_save(state, tmp_path / "c")
    state["t"].add_(1)
    state["n"] = 2
    handle.result(60)
    target = {"t": put(torch.zeros(16, 8), mesh((8,)), ("a", None)), "n": None}
    xc.load(target, tmp_path / "c")
    assert holds(target["t"], host) and target["n"] == 1


def test_all_saves_of_a_process_share_one_stager(tmp_path):
    stager = default_stager()
    for n in range(3):
        handle = xc.async_save({"n": n}, tmp_path / str(n))
        assert default_stager() is stager and stager.timeline is handle.timeline
    stager.wait()
    assert [value_of(tmp_path / str(n)) for n in range(3)] == [0, 1, 2]


def test_the_next_save_raises_an_error_that_nobody_read(tmp_path, monkeypatch):
    def full(plan, planner):
        raise OSError("no space left on device")

    writer = xc.ShardWriter(tmp_path / "c")
    monkeypatch.setattr(writer, "write_data", full)
    xc.async_save({"n": 1}, storage_writer=writer)
    with pytest.raises(xc.CheckpointError, match=r"an earlier async save failed: .*no space left on device"):
        xc.async_save({"n": 2}, tmp_path / "c")
    xc.async_save({"n": 3}, tmp_path / "c").result(60)
    assert value_of(tmp_path / "c") == 3


PROGRAM = """
import os, sys, time
import torch_xla_ckpt as xc

folder = sys.argv[1]
xc.async_save({"n": 1}, f"{folder}/parent").result(60)
child = os.fork()
if child == 0:
    xc.async_save({"n": 2}, f"{folder}/child").result(60)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0


class Slow(xc.ShardWriter):
    def write_data(self, plan, planner):
        time.sleep(0.5)
        return super().write_data(plan, planner)


xc.async_save({"n": 3}, storage_writer=Slow(f"{folder}/end"))
"""


@pytest.mark.slow
def test_a_forked_child_has_a_stager_of_its_own_and_the_end_of_the_program_waits_for_saves(tmp_path):
    done = interpreters.run(["-c", PROGRAM, tmp_path])
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert [value_of(tmp_path / name) for name in ("parent", "child", "end")] == [1, 2, 3]


@pytest.mark.slow
def test_ranks_save_together_without_a_stager(tmp_path):
    hosts.run(2, "async_saves_without_a_stager", tmp_path)


def test_calls_from_several_threads_save_one_after_the_other(tmp_path):
    def save(thread):
        return [xc.async_save({"n": (thread, n)}, tmp_path / f"{thread}-{n}") for n in range(8)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        handles = [handle for made in pool.map(save, range(4)) for handle in made]
    for handle in handles:
        handle.result(60)
    assert all(value_of(tmp_path / f"{thread}-{n}") == (thread, n) for thread in range(4) for n in range(8))

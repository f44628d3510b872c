"""Async saves of several ranks, and of processes that end during a save."""

import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support import hosts, interpreters
from support.s3 import Server

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


# The number of ranks and the place of snapshots are independent, so each is tried once.
@pytest.mark.parametrize(
    "scenario, world", [("device_snapshots_between_barriers", 4), ("host_snapshots_between_barriers", 2)]
)
def test_saves_and_barriers_at_random_neither_hang_nor_mix(tmp_path, scenario, world):
    hosts.run(world, scenario, tmp_path)


FAILURES = [
    "one_cannot_copy",
    "one_cannot_write",
    "one_gives_up",
    "one_gives_up_before_its_turn",
    "a_group_of_some",
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scenario", FAILURES)
def test_a_failure_on_one_rank_is_raised_on_all(tmp_path, scenario, world):
    hosts.run(world, scenario, tmp_path)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scenario", ["one_never_begins", "the_group_is_destroyed_before_the_end"])
def test_an_absent_rank_and_a_destroyed_process_group_are_named_in_the_error(tmp_path, scenario, world):
    hosts.run(world, scenario, tmp_path)


def test_dead_rank_is_named_in_the_error_of_the_other_ranks(tmp_path):
    hosts.run(4, "one_dies", tmp_path, dying=(1,))


# A program that prints a line when its async save is under way, and then does what the test passes in ``then``.
PROGRAM = """
import signal, sys, threading, time
import torch
import torch_xla_ckpt as xc

# A job in the background of a script starts with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
path, mode, way, then = sys.argv[1:5]
options = eval(sys.argv[5]) if len(sys.argv) > 5 else {}


class Slow(xc.ShardWriter):
    def write_data(self, plan, planner):
        print("writing", flush=True)
        threading.Event().wait(0.5)
        if then == "fail":
            raise OSError("disk on fire")
        return super().write_data(plan, planner)


state = {"t": torch.full((1000, 300), 2.0), "n": 2}
if mode == "device":
    from support.meshes import mesh, put

    state["t"] = put(state["t"], mesh((8,)), ("a", None))
stager = xc.SPMDStager(mode, part_bytes=1 << 16)
writer = Slow(path, **options)
if way == "xc":
    handle = xc.async_save(state, storage_writer=writer, stager=stager)
else:
    import torch.distributed.checkpoint as dcp

    planner = xc.SPMDSavePlanner()
    handle = dcp.async_save(state, storage_writer=writer, planner=planner, async_stager=stager)
if then == "close":
    with stager:
        print("waiting", flush=True)
if then == "cancel":
    stager.close(cancel=True)
    print("cancelled", flush=True)
if then == "loop":
    with stager:
        while True:
            time.sleep(0.01)
if then == "term":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    with stager:
        while True:
            time.sleep(0.01)
"""


def program(path, mode, way, then, *options):
    return interpreters.Program(
        ["-c", PROGRAM, path, mode, way, then, *options],
        modules=interpreters.XLA if mode == "device" else interpreters.HOST,
    )


def first_save(path):
    xc.save({"t": torch.full((1000, 300), 1.0), "n": 1}, path)


def number_in(path):
    """Return the number that every value of the checkpoint at ``path`` holds."""
    state = {"t": torch.zeros(1000, 300), "n": 0}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert state["t"].eq(state["n"]).all()
    return state["n"]


def output_of(process):
    return process.communicate(timeout=120)


@pytest.mark.parametrize("way", ["xc", "dcp"])
@pytest.mark.parametrize("mode", ["device", "host"])
def test_a_program_that_ends_commits_its_async_save(tmp_path, mode, way):
    first_save(tmp_path / "c")
    process = program(tmp_path / "c", mode, way, "end")
    _out, err = output_of(process)
    assert process.returncode == 0, err
    assert number_in(tmp_path / "c") == 2
    assert "Traceback" not in err


@pytest.mark.parametrize("way", ["xc", "dcp"])
def test_a_program_that_ends_prints_the_error_of_its_async_save(tmp_path, way):
    first_save(tmp_path / "c")
    process = program(tmp_path / "c", "host", way, "fail")
    _out, err = output_of(process)
    assert "disk on fire" in err and number_in(tmp_path / "c") == 1


@pytest.mark.parametrize("way", ["xc", "dcp"])
def test_a_program_that_cancels_leaves_the_previous_checkpoint_and_no_other_files(tmp_path, way):
    first_save(tmp_path / "c")
    before = sorted(file.name for file in (tmp_path / "c").iterdir())
    process = program(tmp_path / "c", "device", way, "cancel")
    out, err = output_of(process)
    assert process.returncode == 0 and "cancelled" in out, err
    assert sorted(file.name for file in (tmp_path / "c").iterdir()) == before and number_in(tmp_path / "c") == 1


@pytest.mark.parametrize("way", ["xc", "dcp"])
@pytest.mark.parametrize(
    "signal_, then, status, number",
    [
        (signal.SIGINT, "loop", (1, -signal.SIGINT), 2),  # the end of the with block waits for the save
        (signal.SIGTERM, "term", (7,), 2),
        (signal.SIGTERM, "loop", (-signal.SIGTERM,), 1),  # there is no handler, so the process ends at once
        (signal.SIGKILL, "loop", (-signal.SIGKILL,), 1),
    ],
)
def test_a_signal_during_a_save_leaves_one_checkpoint_whole(tmp_path, signal_, then, status, number, way):
    first_save(tmp_path / "c")
    process = program(tmp_path / "c", "device", way, then)
    assert process.stdout.readline() == "writing\n", process.communicate(timeout=60)
    process.send_signal(signal_)
    _out, err = output_of(process)
    assert process.returncode in status, err
    assert number_in(tmp_path / "c") == number
    xc.save({"t": torch.full((1000, 300), 3.0), "n": 3}, tmp_path / "c")  # also removes the files of the killed save
    assert number_in(tmp_path / "c") == 3 and len(list((tmp_path / "c").glob("manifest-*"))) == 1


def test_a_second_interrupt_gives_up_the_save_that_the_first_waits_for(tmp_path):
    first_save(tmp_path / "c")
    process = program(tmp_path / "c", "device", "xc", "close")
    lines = {process.stdout.readline(), process.stdout.readline()}
    assert lines == {"writing\n", "waiting\n"}, process.communicate(timeout=60)
    process.send_signal(signal.SIGINT)
    _out, err = output_of(process)
    assert process.returncode != 0 and "KeyboardInterrupt" in err
    assert number_in(tmp_path / "c") == 1


@pytest.mark.parametrize("way", ["xc", "dcp"])
@pytest.mark.parametrize("mode", ["device", "host"])
def test_a_program_that_ends_commits_its_async_save_to_an_object_store(mode, way):
    """s3fs needs executors and an event loop, which Python takes down before it waits for threads."""
    with Server() as server, server.bucket("background") as bucket:
        url = f"s3://{bucket.name}/run/step-1"
        process = program(url, mode, way, "end", repr({"storage_options": server.options}))
        _out, err = output_of(process)
        assert process.returncode == 0 and "Traceback" not in err, err
        state = {"t": torch.zeros(1000, 300), "n": 0}
        xc.load(state, url, storage_reader=xc.ShardReader(url, storage_options=server.options))
        assert state["n"] == 2 and state["t"].eq(2).all()

"""A checkpoint is replaced in one step: kills, full disks and other failures at every point of a save."""

import dataclasses
import functools
import json
import logging
import re
import signal
import threading

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torch_xla_ckpt as xc
from support import interpreters
from support.crash_points import NEW, NEXT, OLD, checkpoint_files, empty, loads, names, part, save, stock_save
from support.fault_injection import Blow, Trap, read_notes
from support.fork_server import ForkServer
from support.killed_device_save import SPECS, on_devices
from support.meshes import holds
from torch_xla_ckpt.storage import files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

FIRST = {
    *("makedirs folder", "open folder", "fsync folder", "close folder"),
    *(f"{verb} {kind}" for verb in ("create", "write", "fsync", "close") for kind in ("data", "manifest", "temporary")),
    *(f"{verb} lease" for verb in ("create", "write", "close", "unlink")),
    "replace metadata",
}
OVER = {
    "nothing": FIRST,
    "rank": {*FIRST, "unlink data", "unlink metadata"},
    "stock": {*FIRST, "unlink data"},
    "ours": {*FIRST, "unlink data", "unlink manifest", "unlink temporary"},
}
"""The operations that a save consists of, each of which is struck, by what lies in the folder before."""


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    yield server
    server.close()


def strike_everywhere(fork_server, folder, old, world, how):
    result, _ = fork_server.call("support.crash_points.run", old, world, how, folder / "attempts")
    assert set(result["struck"]) == OVER[old]
    assert not result["problems"], f"{len(result['problems'])} of {result['attempts']}: " + "\n".join(
        result["problems"][:3]
    )


@pytest.mark.parametrize("old, world", [("nothing", 2), ("ours", 1), ("ours", 2), ("stock", 2), ("rank", 1)])
def test_a_process_killed_at_any_operation_leaves_the_old_or_the_new_checkpoint(fork_server, tmp_path, old, world):
    """And the processes that were not killed do not hang, and the next save succeeds and leaves no garbage."""
    strike_everywhere(fork_server, tmp_path, old, world, "kill")


@pytest.mark.parametrize("old, world", [("nothing", 1), ("stock", 1), ("rank", 1), ("ours", 2)])
def test_an_error_at_any_operation_is_raised_on_every_rank_and_leaves_the_old_checkpoint(
    fork_server, tmp_path, old, world
):
    """And what the failed process has written goes at once. Errors in clearing up after the commit are warnings."""
    strike_everywhere(fork_server, tmp_path, old, world, "fail")


def test_an_interrupt_at_any_operation_leaves_the_old_or_the_new_checkpoint_and_no_thread(fork_server, tmp_path):
    strike_everywhere(fork_server, tmp_path, "ours", 1, "interrupt")


@pytest.mark.parametrize("failure", ["full_disk", "read_only_disk", "file_size_limit", "no_permission"])
def test_a_disk_that_takes_no_more_keeps_the_old_checkpoint(fork_server, tmp_path, failure):
    _, skipped = fork_server.call(f"support.disk_failures.{failure}", tmp_path)
    if skipped:
        pytest.skip(skipped)


def test_a_program_killed_while_it_saves_from_devices_leaves_the_old_or_the_new_checkpoint(tmp_path):
    blows = {
        OLD: Blow(0, "replace", "metadata", 0, "before", "kill"),
        NEW: Blow(0, "replace", "metadata", 0, "after", "kill"),
    }
    programs = {}
    for state, blow in blows.items():
        (tmp_path / state).mkdir()
        arguments = [tmp_path / state, json.dumps(dataclasses.asdict(blow))]
        programs[state] = interpreters.Program(
            ["-m", "support.killed_device_save", *arguments], modules=interpreters.XLA
        )
    try:
        assert [program.wait(timeout=100) for program in programs.values()] == [-signal.SIGKILL] * 2
    finally:
        for program in programs.values():
            program.kill()
    for state in programs:
        checkpoint = tmp_path / state / "checkpoint"
        assert loads(checkpoint) == state
        target = on_devices(empty(), (2, 4))
        xc.load(target, checkpoint)
        assert all(holds(target["model"][key], part(state)["model"][key]) for key in SPECS)
        xc.save(on_devices(part(NEXT), (2, 4)), checkpoint)
        assert loads(checkpoint) == NEXT and names(checkpoint) == checkpoint_files(checkpoint)


@pytest.fixture
def saved(tmp_path):
    """A folder with the old checkpoint."""
    save(OLD, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def trapped(tmp_path, monkeypatch):
    """Strike at an operation of this process; returns what happened until now."""

    def trap(verb=None, kind=None, number=0, how="fail"):
        moment = "during" if verb == "write" else "before"
        blow = verb and Blow(0, verb, kind, number, moment, how)
        monkeypatch.setattr(files, "os", Trap(tmp_path / "notes", blow))
        return functools.partial(read_notes, tmp_path / "notes")

    yield trap
    monkeypatch.undo()


@pytest.mark.parametrize("number", range(len(part(OLD)["model"]) + 1))
def test_a_planner_that_fails_leaves_the_old_checkpoint(saved, monkeypatch, number):
    before, resolve, calls = names(saved), xc.SPMDSavePlanner.resolve_data, []

    def failing(self, item):
        calls.append(item)
        if len(calls) > number:
            raise RuntimeError("the device is gone")
        return resolve(self, item)

    with monkeypatch.context() as patch:
        patch.setattr(xc.SPMDSavePlanner, "resolve_data", failing)
        with pytest.raises(xc.CheckpointError, match="could not be saved: RuntimeError: the device is gone"):
            save(NEW, saved)
    assert names(saved) == before and loads(saved) == OLD
    save(NEXT, saved)
    assert names(saved) == checkpoint_files(saved) and loads(saved) == NEXT


def test_a_thread_that_cannot_be_started_leaves_the_old_checkpoint_and_no_other_thread(saved, monkeypatch):
    before, start = names(saved), threading.Thread.start

    def failing(self):
        if self.name == "ShardWriter-1":
            raise RuntimeError("can't start new thread")
        self.daemon = True  # what hangs must not keep the tests from ending
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        with pytest.raises(xc.CheckpointError, match="can't start new thread"):
            save(NEW, saved)
    writers = [thread for thread in threading.enumerate() if thread.name.startswith("ShardWriter")]
    for thread in writers:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in writers), "the program could never end"
    assert names(saved) == before and loads(saved) == OLD


def test_dcp_save_raises_dcps_own_exception_with_the_cause(saved, trapped):
    before = names(saved)
    trapped("write", "data", 1)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(part(NEW), storage_writer=xc.ShardWriter(saved), planner=xc.SPMDSavePlanner())
    cause, _ = caught.value.failures[0]
    assert isinstance(cause, OSError) and "No space left on device" in str(cause) and ".distcp" in str(cause)
    assert names(saved) == before and loads(saved) == OLD


def test_what_cannot_be_removed_after_the_commit_is_a_warning_and_goes_with_the_next_save(saved, trapped, caplog):
    before = names(saved)
    trapped("unlink", "data")
    with caplog.at_level(logging.WARNING):
        save(NEW, saved)
    assert "is saved, but files of an older one could not be removed" in caplog.text and "Permission" in caplog.text
    assert before & names(saved) and loads(saved) == NEW
    save(NEXT, saved)
    assert names(saved) == checkpoint_files(saved) and loads(saved) == NEXT


FOREIGN = [
    "notes.txt",
    "__0_0.distcp.bak",
    "__0_0-0123456789abcdef.distcp.bak",
    "old-__0_0-0123456789abcdef.distcp",
    "__0_0-0123456789ABCDEF.distcp",
    "__0_0-checkpoint.distcp",
    ".metadata.bak",
    "manifest.json",
    "manifest-2024.json",
    "model.safetensors",
]


@pytest.mark.parametrize("old", [None, "ours", "stock"])
def test_files_of_the_users_own_are_never_touched(tmp_path, old):
    if old == "stock":
        stock_save(OLD, tmp_path)
    elif old == "ours":
        save(OLD, tmp_path)
    for name in FOREIGN:
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    save(OLD, tmp_path / "folder" / "another")
    for state in (NEW, NEXT):
        save(state, tmp_path)
        assert loads(tmp_path) == state
        assert names(tmp_path) == {*checkpoint_files(tmp_path), *FOREIGN, "folder"}
    assert all((tmp_path / name).read_text() == name for name in FOREIGN)
    assert loads(tmp_path / "folder" / "another") == OLD


def test_stock_dcp_and_this_package_save_over_each_other(tmp_path):
    save(OLD, tmp_path)
    stock_save(NEW, tmp_path)
    assert loads(tmp_path) == NEW
    save(NEXT, tmp_path)
    assert loads(tmp_path) == NEXT and names(tmp_path) == checkpoint_files(tmp_path)
    stock_save(OLD, tmp_path, single_file_per_rank=False)
    assert loads(tmp_path) == OLD
    save(NEW, tmp_path)
    assert loads(tmp_path) == NEW and names(tmp_path) == checkpoint_files(tmp_path)


def save_alone(state, path, storage=xc.ShardWriter):
    """Save as a single rank, without the others: its metadata lies in a file of its own."""
    dcp.save(part(state), storage_writer=storage(path), no_dist=True, use_collectives=False)


@pytest.mark.parametrize("storage", [xc.ShardWriter, dcp.FileSystemWriter])
def test_what_a_single_rank_saved_stays_until_all_have_saved(tmp_path, trapped, monkeypatch, storage):
    path = tmp_path / "checkpoint"
    save_alone(OLD, path, storage)
    before = names(path)
    assert "__0.metadata" in before and loads(path) == OLD
    trapped("replace", "metadata")
    with pytest.raises(xc.CheckpointError, match="Permission denied"):
        save(NEW, path)
    monkeypatch.undo()
    assert before <= names(path) and loads(path) == OLD
    save(NEW, path)
    assert loads(path) == NEW and names(path) == checkpoint_files(path)


def test_a_single_rank_that_saves_does_not_break_what_all_have_saved(saved):
    """Readers would go on to prefer the old one, so it is refused."""
    with pytest.raises(xc.CheckpointError, match="into another folder"):
        save_alone(NEW, saved)
    assert loads(saved) == OLD and names(saved) == checkpoint_files(saved)


def test_a_single_rank_replaces_what_it_saved(tmp_path):
    for state in (OLD, NEW, NEXT):
        save_alone(state, tmp_path)
        assert loads(tmp_path) == state
        assert len(list(tmp_path.glob("manifest-*"))) == 1


DAMAGES = {
    "garbage": lambda whole: b"\x93garbage" * 100,
    "empty": lambda whole: b"",
    "cut off": lambda whole: whole[: len(whole) // 2],
    "longer": lambda whole: whole + b"\n",
    "another id": lambda whole: re.sub(rb"\ntorch_xla_ckpt [0-9a-f]{16}", b"\ntorch_xla_ckpt 0123456789abcdef", whole),
}


@pytest.mark.parametrize(
    "damage, old", [*((damage, "ours") for damage in DAMAGES), ("garbage", "stock"), ("cut off", "stock")]
)
def test_over_metadata_that_cannot_be_read_nothing_is_removed_before_the_commit(tmp_path, trapped, damage, old):
    path = tmp_path / "checkpoint"
    save(OLD, path) if old == "ours" else stock_save(OLD, path)
    damaged = DAMAGES[damage]((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(damaged)
    before = names(path)
    trapped("replace", "metadata")
    with pytest.raises(xc.CheckpointError, match="Permission denied"):
        save(NEW, path)
    assert before <= names(path) and (path / ".metadata").read_bytes() == damaged
    happened = trapped()
    save(NEW, path)
    verbs = [note.verb for note in happened()]
    assert "unlink" not in verbs[: verbs.index("replace")]
    assert loads(path) == NEW
    save(NEXT, path)
    assert loads(path) == NEXT and names(path) == checkpoint_files(path)

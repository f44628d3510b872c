"""CheckpointManager in one process: what it saves, keeps, deletes and brings back."""

import io
import json
import logging
import math
import os
import random
import shutil
import signal
import threading
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.experimental.distributed_checkpoint as torch_xla_manager

import torch_xla_ckpt as xc
from support.meshes import holds, mesh, put
from support.runs import state
from support.s3 import Server
from support.training import Training, on_host
from torch_xla_ckpt.storage import files

pytestmark = pytest.mark.filterwarnings("ignore")

METHODS = ("save", "save_async")


def held(path, step):
    found = {"t": torch.zeros(20), "n": None}
    xc.load(found, path / str(step))
    assert found["t"].eq(found["n"]).all()
    return found["n"]


def fill(manager, *steps, **how):
    for step in steps:
        assert manager.save(step, state(step), force=True, **how)
    manager.wait()


# The loop.


@pytest.mark.parametrize("method", METHODS)
def test_a_loop_saves_what_is_due_and_goes_on_from_the_newest(tmp_path, method):
    with xc.CheckpointManager(tmp_path, 10) as manager:
        assert manager.restore_latest({"n": 0}) is None
        taken = [step for step in range(25) if getattr(manager, method)(step, state(step))]
        manager.wait()
        assert taken == manager.all_steps() == [0, 10, 20] and manager.latest_step() == 20
    with xc.CheckpointManager(tmp_path, 10) as manager:
        found = state(-1)
        assert manager.restore_latest(found) == 20
        assert found["n"] == 20 and found["t"].eq(20).all() and manager.report is not None
        manager.restore(10, found)
        assert found["n"] == 10
        with pytest.raises(xc.CheckpointError, match=r"there is no step 11 .* \[0, 10, 20\]"):
            manager.restore(11, found)


def test_a_whole_run_comes_back_into_nothing(tmp_path):
    training = Training()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optim, 3)

    class Loader:
        position = 0

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    loader = Loader()
    with xc.CheckpointManager(tmp_path, 2, rng=True, device_memory_limit=1 << 30) as manager:
        for step in range(5):
            training.step()
            scheduler.step()
            loader.position += 8
            whole = {
                "model": training.model.state_dict(),
                "optim": training.optim.state_dict(),
                "scheduler": scheduler,
                "loader": loader,
            }
            manager.save_async(step, whole)
    drawn = [torch.rand(3), np.random.rand(3), random.random(), xm.get_rng_state()]
    expected = on_host({"model": training.model.state_dict()})
    torch.manual_seed(9), np.random.seed(9), random.seed(9), xm.set_rng_state(9)

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optim = torch.optim.AdamW(model.parameters())
    again = torch.optim.lr_scheduler.StepLR(optim, 3)
    other = Loader()
    with xc.CheckpointManager(tmp_path, 2, rng=True) as manager:
        rules = {"0.weight": ("a", "b"), "2.weight": ("a", None)}
        step = manager.restore_latest(
            model=model, optimizer=optim, sharding=rules, mesh=mesh((2, 4)), scheduler=again, loader=other
        )
    assert xm.get_rng_state() == drawn[3]  # before a sync moves it
    assert step == 4 and other.position == 40 and again.state_dict() == scheduler.state_dict()
    for name, parameter in model.state_dict().items():
        assert holds(parameter, expected[f"model.{name}"]), name
    assert len(optim.state) == 4
    assert torch.equal(torch.rand(3), drawn[0]) and np.array_equal(np.random.rand(3), drawn[1])
    assert random.random() == drawn[2]


def test_random_generators_of_a_run_that_has_none_stay(tmp_path, caplog):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        manager.save(0, state(0))
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    with xc.CheckpointManager(tmp_path, 1, rng=True) as manager:
        assert manager.restore_latest(state(1)) == 0
    assert torch.equal(torch.get_rng_state(), expected)
    assert "rng_of_processes: the checkpoint has no state of single ranks" in caplog.text
    assert "Rank 0 keeps what it has" in caplog.text


def test_metrics_metadata_and_history(tmp_path):
    with xc.CheckpointManager(tmp_path, 1, keep=xc.keep.Best(2, "loss") | xc.keep.Latest(1)) as manager:
        losses = [0.9, 0.3, math.nan, 0.5, torch.tensor(0.7)]
        for step, loss in enumerate(losses):
            manager.save_async(step, state(step), metrics={"loss": loss}, metadata={"note": [step, "é"]})
            manager.wait()
        assert manager.all_steps() == [1, 3, 4] and manager.best_step() == 1
        assert manager.best_step("loss", "max") == 4 and manager.best_step("accuracy") is None
        assert manager.metrics(3) == {"loss": 0.5} and manager.metadata(3) == {"note": [3, "é"]}
        history = manager.history()
    assert [one.step for one in history] == [0, 1, 2, 3, 4]
    assert history[1].metrics == {"loss": 0.3} and history[2].metrics == {}
    for one in history:
        assert one.nbytes > 80 and 0 < one.blocked_seconds <= one.seconds and one.mode == "host"
    assert str(history).splitlines()[0].split()[:2] == ["step", "committed"] and "loss 0.3" in str(history)
    from rich.console import Console

    console = Console(width=150, record=True, file=io.StringIO())
    console.print(history)
    printed = console.export_text()
    assert "loss 0.3" in printed and "What was saved" in printed
    with pytest.raises(ValueError, match="say which metric"):
        xc.CheckpointManager(tmp_path, 1).best_step()
    with pytest.raises(TypeError):
        xc.CheckpointManager(tmp_path, 1).save(9, state(9), metadata=object())


# Drop in.


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """torch_xla's manager insists on a process group."""
    place = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def program(manager, path):
    """What a program does with torch_xla's manager; returns all that it sees of it."""
    seen = [manager.base_path == os.path.join(path, ""), manager.save_interval, manager.chkpt_on_preemption]
    seen += [manager.should_save(step) for step in (0, 1, 2, 3)]
    seen += [manager.save(0, state(0)), manager.save(1, state(1)), manager.save(1, state(1), True)]
    seen += [
        manager.save_async(2, state(2)),
        manager.save_async(3, state(3)),
        manager.save_async(3, state(3), force=True),
    ]
    seen += [manager.join(), manager.all_steps(), manager._get_path(7).removeprefix(str(path))]
    target = {"t": torch.zeros(20), "n": None}
    seen += [manager.restore(1, target), target["t"].tolist(), target["n"]]
    return seen


def test_it_takes_the_place_of_torch_xlas_manager(tmp_path, group):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    options = {"save_interval": 2, "max_pending_async": 1, "num_of_threads": 2, "process_group": None}
    expected = program(torch_xla_manager.CheckpointManager(str(theirs), chkpt_on_preemption=False, **options), theirs)
    manager = xc.CheckpointManager(str(ours), chkpt_on_preemption=False, **options)
    assert program(manager, ours) == expected
    assert manager.reached_preemption(5) is False
    positional = xc.CheckpointManager(str(tmp_path / "p"), 3, 2, 1, 4, dist.group.WORLD, True)
    assert (positional.max_to_keep, positional.chkpt_on_preemption) == (2, True)
    positional.close()


def test_what_torch_xlas_manager_wrote_is_found_restored_and_retired_without_unpickling(tmp_path, group):
    theirs = torch_xla_manager.CheckpointManager(str(tmp_path), 1, chkpt_on_preemption=False)
    for step in range(3):
        theirs.save(step, state(step))
    (tmp_path / "1" / ".manager_metadata").write_bytes(
        b"cos\nsystem\n(S'touch " + str(tmp_path).encode() + b"/run'\ntR."
    )
    manager = xc.CheckpointManager(tmp_path, 1, max_to_keep=2)
    assert manager.all_steps() == [0, 1, 2]
    target = state(-1)
    manager.restore(1, target)
    assert target["n"] == 1 and target["t"].eq(1).all() and not (tmp_path / "run").exists()
    fill(manager, 3)
    assert manager.all_steps() == [2, 3] and not (tmp_path / "0").exists()
    manager.close()


@pytest.mark.parametrize("most", [0, None])
def test_no_limit_keeps_all(tmp_path, most):
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=most) as manager:
        fill(manager, *range(6))
        assert manager.all_steps() == list(range(6))


def test_options_that_make_no_sense(tmp_path):
    for options in ({"save_interval": 0}, {"max_to_keep": -1}, {"max_pending_async": 0}, {"initial": "half"}):
        with pytest.raises(ValueError):
            xc.CheckpointManager(tmp_path, **options)
    for options in ({"keep": 3}, {"when": "often"}):
        with pytest.raises(TypeError):
            xc.CheckpointManager(tmp_path, **options)
    with xc.CheckpointManager(tmp_path, 1) as manager, pytest.raises(ValueError, match="must not be negative"):
        manager.save(-1, state(0))
    with pytest.raises(xc.CheckpointError, match="the manager is closed"):
        manager.save(1, state(1))


# Only committed steps exist.


def test_a_step_is_there_when_it_is_committed_and_not_before(tmp_path, monkeypatch):
    reached, opened = threading.Event(), threading.Event()
    write = xc.ShardWriter.write_data

    def slow(self, plan, planner):
        reached.set()
        assert opened.wait(60)
        return write(self, plan, planner)

    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager, xc.CheckpointManager(tmp_path, 1) as other:
        fill(manager, 1)
        monkeypatch.setattr(xc.ShardWriter, "write_data", slow)
        manager.save_async(2, state(2))
        assert reached.wait(60)
        assert manager.all_steps() == other.all_steps() == [1] and manager.latest_step() == 1
        assert [verdict.kept for verdict in manager.plan_retention()] == [True]
        opened.set()
        manager.wait()
        assert manager.all_steps() == other.all_steps() == [2]


@pytest.mark.parametrize("method", METHODS)
def test_saving_a_step_again_replaces_it_or_leaves_it(tmp_path, method, monkeypatch):
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        fill(manager, 5)
        assert getattr(manager, method)(5, state(6))
        manager.wait()
        assert manager.all_steps() == [5] and held(tmp_path, 5) == 6
        monkeypatch.setattr(xc.ShardWriter, "write_data", broken)
        with pytest.raises(xc.CheckpointError, match="disk on fire"):
            getattr(manager, method)(5, state(7))
            manager.wait()
        assert manager.all_steps() == [5] and held(tmp_path, 5) == 6


def broken(self, plan, planner):
    raise OSError("disk on fire")


@pytest.mark.parametrize("then", ["wait", "close", "save", "save_async"])
def test_what_failed_in_the_background_is_raised(tmp_path, then, monkeypatch):
    manager = xc.CheckpointManager(tmp_path, 1)
    fill(manager, 1)
    with monkeypatch.context() as patched:
        patched.setattr(xc.ShardWriter, "write_data", broken)
        manager.save_async(2, state(2))
        for save in manager._stager._saves:
            save.wait()
    arguments = (3, state(3)) if then.startswith("save") else ()
    with pytest.raises(xc.CheckpointError, match=r"an earlier async save failed: .*disk on fire"):
        getattr(manager, then)(*arguments)
    assert manager.all_steps() == ([1, 3] if then == "save" else [1])  # a save that can be made is made first
    manager.close()


def test_a_damaged_step_is_skipped_with_its_reason(tmp_path, caplog):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        fill(manager, *range(1, 7))
    (data,) = (file for file in (tmp_path / "3").iterdir() if file.suffix == ".distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1  # found when it is read
    data.write_bytes(content)
    next((tmp_path / "4").glob("*.distcp")).unlink()
    next((tmp_path / "5").glob("manifest-*")).write_text("{}")
    (tmp_path / "6" / ".metadata").write_bytes(b"")
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        target = state(-1)
        assert manager.restore_latest(target) == 2 and target["n"] == 2
        assert manager.all_steps() == [1, 2]
        for step, why in ((3, "checksum"), (4, "is missing or too short"), (5, "manifest"), (6, "metadata")):
            (text,) = [record.getMessage() for record in caplog.records if f"step {step} of" in record.getMessage()]
            assert "is skipped, because it is damaged" in text and why in text, text
        assert [verdict.step for verdict in manager.plan_retention() if not verdict.kept] == [1]
        manager.save(7, state(7))
        manager.wait()
        assert manager.all_steps() == [7]
    for step in (4, 5, 6):
        assert (tmp_path / str(step)).exists()  # not ours to judge


def test_if_all_steps_are_damaged_nobody_begins_anew_by_mistake(tmp_path):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        fill(manager, 1, 2)
    for file in tmp_path.glob("*/*.distcp"):
        file.write_bytes(b"")
    with (
        xc.CheckpointManager(tmp_path, 1) as manager,
        pytest.raises(xc.CheckpointError, match=r"(?s)none of them can be restored:.*2: .*1: .*another path"),
    ):
        manager.restore_latest(state(0))


def test_a_target_that_does_not_fit_is_no_damage(tmp_path):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        fill(manager, 1, 2)
        with pytest.raises(xc.MismatchError):
            manager.restore_latest({"t": torch.zeros(3), "n": 0})
        assert manager.all_steps() == [1, 2]


def test_what_is_no_checkpoint_is_reported_once_and_never_touched(tmp_path, caplog):
    for name in ("5", "6", "007", "logs", "8"):
        (tmp_path / name).mkdir()
    (tmp_path / "5" / "notes.txt").write_text("mine")
    (tmp_path / "6" / ".metadata").write_text("title: mine")
    (tmp_path / "7").write_text("a file")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        fill(manager, 10, 11)
        assert manager.all_steps() == manager.all_steps() == [11] and manager.latest_step() == 11
        said = [record.getMessage() for record in caplog.records if "not a checkpoint's" in record.getMessage()]
        assert len(said) == 1 and str(tmp_path / "6") in said[0]
        fill(manager, 12)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert (tmp_path / "007").exists() and (tmp_path / "logs").exists()


def test_a_users_file_in_a_step_outlives_it(tmp_path):
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        fill(manager, 1)
        (tmp_path / "1" / "notes.txt").write_text("mine")
        fill(manager, 2)
        assert manager.all_steps() == [2] and [file.name for file in (tmp_path / "1").iterdir()] == ["notes.txt"]


# Retention.


def test_the_plan_says_why_and_deletes_nothing(tmp_path):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        for step in range(1, 8):
            fill(manager, step, metrics={"loss": abs(step - 3)})
    manager = xc.CheckpointManager(
        tmp_path,
        1,
        keep=xc.keep.Latest(1) | xc.keep.Best(1, "loss") | xc.keep.Every(steps=5) | (lambda one: one.step == 1),
    )
    plan = manager.plan_retention()
    assert manager.all_steps() == list(range(1, 8))
    assert [verdict.step for verdict in plan if verdict.kept] == [1, 3, 5, 7]
    reasons = {verdict.step: verdict.reason for verdict in plan}
    assert reasons[7] == "one of the latest 1" and reasons[3] == "one of the best 1 by loss (0)"
    assert reasons[5] == "a multiple of 5" and reasons[2] == "no policy wants it, and step 7 is newer"
    manager.save(8, state(8), metrics={"loss": 9})
    manager.wait()
    assert manager.all_steps() == [1, 3, 5, 8]
    events = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    deleted = {event["step"]: event["reason"] for event in events if event["event"] == "deleted"}
    assert deleted.keys() == {2, 4, 6, 7}
    assert deleted[2] == "no policy wants it, and step 7 is newer"  # before the save, by the policy of now
    assert deleted[7] == "no policy wants it, and step 8 is newer"
    manager.close()


def test_checkpoints_that_no_manager_wrote_are_steps_and_are_never_deleted(tmp_path, caplog):
    xc.save(state(3), tmp_path / "3", step=3, user_metadata={"metrics": {"loss": 0}})
    dcp.save(state(4), checkpoint_id=tmp_path / "4", no_dist=True)
    xc.save(state(2024), tmp_path / "2024")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        assert manager.all_steps() == [3, 4, 2024] and manager.restore_latest(state(0)) == 2024
        target = state(0)
        manager.restore(4, target)
        assert target["n"] == 4
        fill(manager, 10)
        fill(manager, 20)
        assert manager.all_steps() == [3, 4, 20, 2024], "what others wrote must not push out what was just saved"
        assert all(one.kept for one in manager.plan_retention())
        fill(manager, 3000, 3001)
        assert manager.all_steps() == [3, 4, 2024, 3001]
        reasons = {one.step: one.reason for one in manager.plan_retention()}
    assert reasons[3] == "no policy wants it, but no CheckpointManager wrote it, so it is yours to delete"
    assert reasons[3] == reasons[4] == reasons[2024] and reasons[3001] == "one of the latest 1"
    assert all(path.read_bytes() == content for path, content in before.items())
    said = [r.getMessage() for r in caplog.records if "no policy wants the steps" in r.getMessage()]
    assert [text.split(" of ")[0].split(" steps ")[1] for text in said] == ["3, 4", "2024"]
    assert all("delete their folders yourself" in text and str(tmp_path) in text for text in said)


def test_the_last_step_stays_whatever_the_policy_says(tmp_path):
    with xc.CheckpointManager(tmp_path, 1, keep=lambda one: False) as manager:
        for step in range(3):
            fill(manager, step)
            assert manager.all_steps() == [step]
        assert "the newest that can be restored" in manager.plan_retention()[0].reason


def test_nothing_is_deleted_for_a_step_that_cannot_be_read_back(tmp_path, monkeypatch, caplog):
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        fill(manager, 1)
        flaw = type(manager._steps).flaw
        monkeypatch.setattr(
            type(manager._steps), "flaw", lambda *a, **k: "its manifest is gone" if a[1] == 2 else flaw(*a, **k)
        )
        fill(manager, 2)
        assert "cannot be read back: its manifest is gone" in caplog.text
        assert (tmp_path / "1" / ".metadata").exists()


def test_going_back_deletes_nothing_newer_for_something_older(tmp_path):
    """A run that was restored to step 2 writes step 3 again: that does not make step 9 superfluous."""
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        fill(manager, 9)
        fill(manager, 3)
        assert manager.all_steps() == [3, 9]


def test_deletion_tries_again_and_then_says_so(tmp_path, monkeypatch, caplog):
    failures = 2
    unlink = os.unlink

    class Stubborn:
        def __getattr__(self, name):
            return getattr(os, name)

        def unlink(self, path):
            nonlocal failures
            if failures and str(path).endswith(os.path.join("1", ".metadata")):
                failures -= 1
                raise PermissionError("not now")
            unlink(path)

    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        fill(manager, 1)
        monkeypatch.setattr(files, "os", Stubborn())
        fill(manager, 2)
        assert manager.all_steps() == [2] and "could not be deleted (attempt 2 of 3)" in caplog.text
        fill(manager, 1)
        failures = 100
        manager.save(3, state(3))
        manager.wait()
        assert manager.all_steps() == [1, 3]
        assert any(event["event"] == "failed to delete" for event in manager._journal.events())
        failures = 0
        fill(manager, 4)  # and goes on after the next save
        assert manager.all_steps() == [4]


def test_what_broke_off_is_cleaned_up_and_nothing_else(tmp_path):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        fill(manager, 1, 2, 3)
    (tmp_path / "1" / ".metadata").unlink()  # a deletion that broke off
    (tmp_path / "2" / ".metadata").unlink()
    (tmp_path / "2" / "notes.txt").write_text("mine")
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "__0_0.distcp").write_bytes(b"")  # another program may be about to commit this
    with xc.CheckpointManager(tmp_path, 1) as manager:
        assert manager.all_steps() == [3] and manager.restore_latest(state(0)) == 3
        assert (tmp_path / "1").exists()  # who only reads must not disturb who saves
        fill(manager, 4)
        assert manager.all_steps() == [3, 4] and not (tmp_path / "1").exists()
        assert (tmp_path / "2" / "notes.txt").exists() and (tmp_path / "9" / "__0_0.distcp").exists()
        assert len(list((tmp_path / "2").iterdir())) > 1


# Preemption.


def test_sigterm_saves_the_step_once_and_is_passed_on(tmp_path):
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    try:
        handler = signal.getsignal(signal.SIGTERM)
        manager = xc.CheckpointManager(tmp_path, 1000)
        assert not manager.save_async(1, state(1)) and not manager.reached_preemption(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save_async(2, state(2)) and manager.reached_preemption(2) and called == [1]
        assert not manager.save_async(3, state(3)) and manager.reached_preemption(3)  # once
        manager.close()
        assert manager.all_steps() == [2] and signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_preemption_the_handler_stays(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with xc.CheckpointManager(tmp_path, 1, chkpt_on_preemption=False):
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_manager_of_another_thread_says_that_it_cannot_listen(tmp_path, caplog):
    made = []
    thread = threading.Thread(target=lambda: made.append(xc.CheckpointManager(tmp_path, 1)))
    thread.start()
    thread.join()
    assert "SIGTERM is not noticed" in caplog.text
    made[0].save(0, state(0))
    made[0].close()


# Policies of when, and beginnings.


def test_policies_decide_when_to_save(tmp_path):
    policy = xc.when.At([3, 4]) | xc.when.First() | (lambda now: now.step == 7)
    with xc.CheckpointManager(tmp_path, when=policy) as manager:
        assert [step for step in range(1, 10) if manager.save(step, state(step))] == [1, 3, 4, 7]
    with xc.CheckpointManager(tmp_path, when=policy) as manager:  # not the first any more
        assert [step for step in range(11, 15) if manager.save(step, state(step))] == []
        assert manager.save(15, state(15), force=True)
    last, step, count = time.monotonic(), 0, 0
    with xc.CheckpointManager(tmp_path / "t", when=xc.when.Every(seconds=0.05)) as manager:
        while count < 3:
            begins = time.monotonic()
            if manager.save(step, state(step)):
                assert time.monotonic() - last >= 0.05  # since the last save began, or since the manager did
                last, count = begins, count + 1
            step += 1


@pytest.mark.parametrize("kind", ["run", "checkpoint"])
@pytest.mark.parametrize("what", ["all", "model"])
def test_a_run_begins_with_another_ones_state_only_once(tmp_path, kind, what):
    old = {"model": {"w": torch.full((3,), 5.0)}, "position": 7}
    if kind == "run":
        with xc.CheckpointManager(tmp_path / "old", 1) as manager:
            manager.save(1, {"model": {"w": torch.zeros(3)}, "position": 1})
            manager.save(2, old)
        path = tmp_path / "old"
    else:
        path = tmp_path / "checkpoint"
        xc.save(old, path)
    options = {"save_interval": 1, "initial_path": path, "initial": what}
    with xc.CheckpointManager(tmp_path / "new", **options) as manager:
        target = {"model": {"w": torch.zeros(3)}, "position": 0}
        assert manager.restore_latest(target) is None
        assert target["model"]["w"].eq(5).all() and target["position"] == (7 if what == "all" else 0)
        manager.save(0, {"model": {"w": torch.ones(3)}, "position": 3})
    with xc.CheckpointManager(tmp_path / "new", **options) as manager:
        assert manager.restore_latest(target) == 0
        assert target["model"]["w"].eq(1).all() and target["position"] == 3


# Where.


def test_a_path_that_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(xc.CheckpointError, match="cannot be written"):
        xc.CheckpointManager(tmp_path / "file" / "run", 1)


def test_nothing_of_the_preflight_is_left(tmp_path):
    xc.CheckpointManager(tmp_path / "a" / "b", 1).close()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_an_object_store(tmp_path):
    with Server() as server, server.bucket("run-of-a-manager") as bucket:
        url = f"s3://{bucket.name}/run-7"
        options = {"storage_options": server.options}
        with xc.CheckpointManager(url, 1, max_to_keep=2, **options) as manager:
            for step in range(4):
                manager.save_async(step, state(step), metrics={"loss": step})
            manager.wait()
            assert manager.all_steps() == [2, 3] and manager.best_step("loss") == 2
        assert {key.split("/")[1] for key in bucket.objects()} == {"2", "3", "journal.jsonl"}
        with xc.CheckpointManager(url, 1, **options) as manager:
            target = state(-1)
            assert manager.restore_latest(target) == 3 and target["n"] == 3
            assert [one.step for one in manager.history()] == [0, 1, 2, 3]


def test_two_managers_of_two_runs_do_not_meet(tmp_path):
    with xc.CheckpointManager(tmp_path / "a", 1, 1) as a, xc.CheckpointManager(tmp_path / "b", 1, 2) as b:
        for step in range(4):
            a.save_async(step, state(step))
            b.save_async(step, {"t": put(torch.ones(8), mesh((8,)), ("a",)), "n": step})
            torch_xla.sync()
        a.wait(), b.wait()
        assert a.all_steps() == [3] and b.all_steps() == [2, 3]
    shutil.rmtree(tmp_path / "a")
    assert logging.getLogger("torch_xla_ckpt").level == logging.NOTSET
    warnings.resetwarnings()

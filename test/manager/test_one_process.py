"""CheckpointManager in one process: saving, restoring, retention and preemption."""

import io
import logging
import math
import random
import shutil
import threading
import time
import types
import warnings

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm

import torch_xla_ckpt as xc
from support.meshes import holds, mesh, put
from support.runs import save_steps, state
from support.s3 import Server
from support.training import Training, on_host
from torch_xla_ckpt.manager import agreement, saves

pytestmark = pytest.mark.filterwarnings("ignore")

METHODS = ("save", "save_async")


def held(path, step):
    found = {"t": torch.zeros(20), "n": None}
    xc.load(found, path / str(step))
    assert found["t"].eq(found["n"]).all()
    return found["n"]


# The training loop


@pytest.mark.parametrize("method", METHODS)
def test_training_loop_saves_due_steps_and_resumes_from_the_newest(tmp_path, method):
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


def test_idle_saves_the_step_after_the_last_save_has_ended(tmp_path, monkeypatch):
    may_write, write = threading.Event(), xc.ShardWriter.write_data

    def held_up(self, *args):
        assert may_write.wait(60)
        return write(self, *args)

    monkeypatch.setattr(xc.ShardWriter, "write_data", held_up)
    with xc.CheckpointManager(tmp_path, when=xc.when.Idle(seconds=0, blocking=1)) as manager:
        assert manager.save_async(0, state(0))
        assert not any(manager.save_async(step, state(step)) for step in range(1, 20))
        may_write.set()
        manager.wait()
        assert manager.save_async(20, state(20))
    assert manager.all_steps() == [0, 20]


def test_idle_judges_an_async_save_by_async_saves_and_not_by_a_synchronous_one(tmp_path, monkeypatch):
    """A program saves its first step with ``save``, which blocks for the whole save."""
    now = 0.0
    clock = types.SimpleNamespace(perf_counter=lambda: now, monotonic=lambda: now)
    monkeypatch.setattr(saves, "time", clock)
    monkeypatch.setattr(agreement, "time", clock)
    saved = saves.api.save

    def slow(*args, **options):
        nonlocal now
        now += 5.0
        return saved(*args, **options)

    monkeypatch.setattr(saves.api, "save", slow)
    with xc.CheckpointManager(tmp_path, when=xc.when.Idle(seconds=1, blocking=0.01)) as manager:
        assert manager.save(0, state(0), force=True)
        now += 1.0
        assert manager.save_async(1, state(1))
        manager.wait()
        now += 10.0
        assert not manager.save(2, state(2))
        now += 489.0
        assert not manager.save(3, state(3))
        now += 1.0
        assert manager.save(4, state(4))
    assert manager.all_steps() == [0, 1, 4]


@pytest.mark.slow
def test_whole_run_is_restored_into_a_meta_model_and_a_new_optimizer(tmp_path):
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


def test_random_generators_keep_their_state_if_the_run_saved_none(tmp_path, caplog):
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
    assert history[1].metrics == {"loss": 0.3} and math.isnan(history[2].metrics["loss"])
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


def test_history_marks_saves_that_cannot_be_restored_any_more(tmp_path):
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=3) as manager:
        save_steps(manager, 0, 1, 2, 3, 2)
        shutil.rmtree(tmp_path / "3")  # somebody else deletes a step
        history = manager.history()
        assert [(one.step, one.gone) for one in history] == [
            (0, "deleted"),
            (1, None),
            (2, "replaced"),
            (3, "deleted"),
            (2, None),
        ]
        lines = str(history).splitlines()
    assert "gone" in lines[0] and ["deleted" in line for line in lines[1:]] == [True, False, False, True, False]


# Committed and damaged steps


def test_step_is_listed_only_after_its_commit(tmp_path, monkeypatch):
    reached, opened = threading.Event(), threading.Event()
    write = xc.ShardWriter.write_data

    def slow(self, plan, planner):
        reached.set()
        assert opened.wait(60)
        return write(self, plan, planner)

    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager, xc.CheckpointManager(tmp_path, 1) as other:
        save_steps(manager, 1)
        monkeypatch.setattr(xc.ShardWriter, "write_data", slow)
        manager.save_async(2, state(2))
        assert reached.wait(60)
        assert manager.all_steps() == other.all_steps() == [1] and manager.latest_step() == 1
        assert [verdict.kept for verdict in manager.plan_retention()] == [True]
        opened.set()
        manager.wait()
        assert manager.all_steps() == other.all_steps() == [2]


@pytest.mark.parametrize("method", METHODS)
def test_saving_a_step_again_replaces_it_or_leaves_it_whole(tmp_path, method, monkeypatch):
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        save_steps(manager, 5)
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
def test_next_call_raises_the_error_of_a_failed_async_save(tmp_path, then, monkeypatch):
    manager = xc.CheckpointManager(tmp_path, 1)
    save_steps(manager, 1)
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


def test_damaged_step_is_skipped_with_a_warning_that_says_why(tmp_path, caplog):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        save_steps(manager, *range(1, 8))
    (data,) = (file for file in (tmp_path / "3").iterdir() if file.suffix == ".distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1  # found when it is read
    data.write_bytes(content)
    next((tmp_path / "4").glob("*.distcp")).unlink()
    next((tmp_path / "5").glob("manifest-*")).write_text("{}")
    (tmp_path / "6" / ".metadata").write_bytes(b"")
    (tmp_path / "7" / ".metadata").unlink()
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        target = state(-1)
        assert manager.restore_latest(target) == 2 and target["n"] == 2
        assert manager.all_steps() == [1, 2]
        reasons = {3: "checksum", 4: "is missing or too short", 5: "manifest", 6: "metadata", 7: ".metadata is missing"}
        for step, why in reasons.items():
            (text,) = [record.getMessage() for record in caplog.records if f"step {step} of" in record.getMessage()]
            assert "is skipped, because it is damaged" in text and why in text, text
        assert [verdict.step for verdict in manager.plan_retention() if not verdict.kept] == [1]
        manager.save(8, state(8))
        manager.wait()
        assert manager.all_steps() == [8]
    for step in (4, 5, 6, 7):
        assert (tmp_path / str(step)).exists()  # a damaged step stays for the user to look at


def test_restore_latest_raises_if_all_steps_are_damaged(tmp_path):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        save_steps(manager, 1, 2)
    for file in tmp_path.glob("*/*.distcp"):
        file.write_bytes(b"")
    with (
        xc.CheckpointManager(tmp_path, 1) as manager,
        pytest.raises(xc.CheckpointError, match=r"(?s)none of them can be restored:.*2: .*1: .*another path"),
    ):
        manager.restore_latest(state(0))


def test_target_that_does_not_fit_does_not_count_as_damage(tmp_path):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        save_steps(manager, 1, 2)
        with pytest.raises(xc.MismatchError):
            manager.restore_latest({"t": torch.zeros(3), "n": 0})
        assert manager.all_steps() == [1, 2]


def test_folder_that_is_not_a_checkpoint_is_reported_once_and_never_changed(tmp_path, caplog):
    for name in ("5", "6", "007", "logs", "8"):
        (tmp_path / name).mkdir()
    (tmp_path / "5" / "notes.txt").write_text("mine")
    (tmp_path / "6" / ".metadata").write_text("title: mine")
    (tmp_path / "7").write_text("a file")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        save_steps(manager, 10, 11)
        assert manager.all_steps() == manager.all_steps() == [11] and manager.latest_step() == 11
        said = [record.getMessage() for record in caplog.records if "not a checkpoint's" in record.getMessage()]
        assert len(said) == 1 and str(tmp_path / "6") in said[0]
        save_steps(manager, 12)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert (tmp_path / "007").exists() and (tmp_path / "logs").exists()


def test_users_file_in_a_step_survives_the_deletion_of_the_step(tmp_path):
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        save_steps(manager, 1)
        (tmp_path / "1" / "notes.txt").write_text("mine")
        save_steps(manager, 2)
        assert manager.all_steps() == [2] and [file.name for file in (tmp_path / "1").iterdir()] == ["notes.txt"]


# When to save, and where a run starts


def test_when_policies_decide_which_steps_are_saved(tmp_path):
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
def test_initial_path_is_loaded_only_while_the_run_has_no_step(tmp_path, kind, what):
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


# Paths


def test_path_that_cannot_be_written_is_an_error_at_construction(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(xc.CheckpointError, match="cannot be written"):
        xc.CheckpointManager(tmp_path / "file" / "run", 1)


def test_preflight_leaves_no_file(tmp_path):
    xc.CheckpointManager(tmp_path / "a" / "b", 1).close()
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.slow
def test_run_in_an_object_store_is_saved_pruned_and_restored(tmp_path):
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


def test_two_managers_of_two_runs_do_not_affect_each_other(tmp_path):
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


def test_metrics_that_are_not_finite_come_back_and_are_never_the_best(tmp_path):
    given = [{"loss": math.nan, "acc": 1.0}, {"loss": math.inf}, {"loss": -math.inf}, {"loss": 3.0}]
    with xc.CheckpointManager(tmp_path, 1) as manager:
        for step, metrics in enumerate(given):
            manager.save(step, state(step), metrics=metrics)
            assert [one.step for one in manager.history()] == list(range(step + 1))  # the save just made is there
        assert manager.best_step("loss") == 3
        assert [str(manager.metrics(step)) for step in range(4)] == [str(metrics) for metrics in given]
        assert str([one.metrics for one in manager.history()]) == str(given)


@pytest.mark.parametrize("option", ["keep", "when"])
def test_a_class_in_place_of_a_policy_is_refused_at_once(tmp_path, option):
    with pytest.raises(TypeError, match=f"{option}= takes policies"):
        xc.CheckpointManager(tmp_path, **{option: {"keep": xc.keep.Latest, "when": xc.when.First}[option]})


def test_a_manager_of_a_checkpoints_own_folder_does_not_start_from_nothing(tmp_path):
    xc.save(state(3), tmp_path / "run" / "3")
    wrong = xc.CheckpointManager(tmp_path / "run" / "3", 1)
    with wrong, pytest.raises(xc.CheckpointError, match="of one checkpoint, not of a run"):
        wrong.restore_latest(state(0))
    with xc.CheckpointManager(tmp_path / "run", 1) as manager:
        assert manager.restore_latest(state(0)) == 3


def test_a_model_is_found_under_its_name_or_the_name_that_is_given(tmp_path):
    saved = torch.nn.Linear(3, 2)
    with xc.CheckpointManager(tmp_path, 1) as manager:
        manager.save(0, {"net": saved.state_dict(), "ema": {"step": torch.ones(1)}})
        manager.save(1, {"net": saved.state_dict(), "ema": {"weight": torch.ones(2, 3), "bias": torch.ones(2)}})
        fresh = torch.nn.Linear(3, 2)
        manager.restore(0, model=fresh)
        assert torch.equal(fresh.weight.detach().cpu(), saved.weight.detach())
        with pytest.raises(xc.CheckpointError, match="Pass model_key="):
            manager.restore(1, model=fresh)
        manager.restore(1, model=fresh, model_key="ema")
        assert fresh.weight.detach().cpu().eq(1).all()
        with pytest.raises(TypeError, match="model_key= was given without model="):
            manager.restore(1, state(0), model_key="ema")

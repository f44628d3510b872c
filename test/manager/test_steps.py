"""Folders in a run: links, foreign folders, damage, deletions by other programs, odd manifests."""

import contextlib
import errno
import json
import logging
import os
import shutil
import threading
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torch_xla_ckpt as xc
from support.runs import fill, newest, state
from torch_xla_ckpt.manager.facts import KEY, facts_of
from torch_xla_ckpt.storage import files
from torch_xla_ckpt.storage.manifest import Manifest

METHODS = ("save", "save_async")
READS = ("size", "view", "read", "names", "folders", "missing")


def manager(path, **options):
    return xc.CheckpointManager(path, **{"chkpt_on_preemption": False, "sync": False, **options})


def failing(self, plan, planner):
    raise OSError("disk on fire")


@contextlib.contextmanager
def at_each_read(act):
    """Call ``act(number)`` before each read of a local folder in this thread. Reads by ``act`` itself do not count."""
    here, count, inside = threading.get_ident(), [0], [False]
    real = {name: getattr(files.LocalFolder, name) for name in READS}

    def wrapped(name):
        def call(self, *args, **kwargs):
            if threading.get_ident() == here and not inside[0]:
                inside[0] = True
                try:
                    count[0] += 1
                    act(count[0])
                finally:
                    inside[0] = False
            return real[name](self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in READS:
            patched.setattr(files.LocalFolder, name, wrapped(name))
        yield count


# Links


def linked(path, elsewhere, step):
    shutil.move(path / str(step), elsewhere)
    (path / str(step)).symlink_to(elsewhere)


def test_link_to_a_step_counts_as_a_step(tmp_path):
    run = tmp_path / "run"
    fill(manager(run), 1, 2)
    linked(run, tmp_path / "disk", 2)
    with manager(run) as reading:
        assert reading.all_steps() == [1, 2] and reading.latest_step() == 2 and newest(reading) == 2


@pytest.mark.parametrize("with_notes", [False, True])
def test_deleting_a_linked_step_deletes_its_files_and_the_link_but_no_file_of_the_user(tmp_path, with_notes):
    run, disk = tmp_path / "run", tmp_path / "disk"
    fill(manager(run), 1, 2)
    linked(run, disk, 1)
    if with_notes:
        (disk / "notes.txt").write_text("mine")
    with manager(run, max_to_keep=1) as saving:
        saving.save(3, state(3), force=True)
        saving.wait()
        assert saving.all_steps() == [3]
    assert sorted(os.listdir(disk)) == (["notes.txt"] if with_notes else [])
    assert (run / "1").is_symlink() == with_notes


def test_broken_link_does_not_count_as_a_step(tmp_path):
    fill(manager(tmp_path), 1)
    (tmp_path / "7").symlink_to(tmp_path / "gone")
    with manager(tmp_path, max_to_keep=1) as saving:
        assert saving.all_steps() == [1] and newest(saving) == 1
        saving.save(8, state(8), force=True)
    assert (tmp_path / "7").is_symlink()


# Folders of the user


@pytest.mark.parametrize("name", ["0", "5", "2024", "99999999999999999999"])
def test_empty_folder_of_the_user_is_never_removed(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "inner").mkdir()
    fill(manager(tmp_path, max_to_keep=1), 7, 8, 9)
    fill(manager(tmp_path, max_to_keep=1), 10)
    assert (tmp_path / name).is_dir() and (tmp_path / "6" / "inner").is_dir()
    assert not (tmp_path / "9").exists()  # which the manager emptied itself


# Deletions by another program


def test_step_deleted_during_a_restore_does_not_count_as_damaged_and_a_newer_one_is_restored(tmp_path, caplog):
    """At each read of an evaluation in turn, the training saves its next step and deletes the one before."""
    with manager(tmp_path, max_to_keep=1) as training, manager(tmp_path) as evaluation:
        training.save(0, state(0), force=True)
        saved, at = 0, 0
        while True:
            at += 1

            def train(number, at=at):
                nonlocal saved
                if number == at:
                    saved += 1
                    training.save(saved, state(saved), force=True)
                    training.wait()

            before = saved
            with at_each_read(train) as count:
                assert before <= newest(evaluation) <= saved
            assert evaluation.all_steps() == [saved] and not evaluation._run.steps.damaged
            if count[0] < at:
                break
        assert at > 8, "the test must have seen every read"
    assert not [record for record in caplog.records if "damaged" in record.getMessage()]


def test_best_step_works_while_another_program_deletes_steps(tmp_path):
    with manager(tmp_path, max_to_keep=1) as training, manager(tmp_path) as evaluation:
        saved = 0
        training.save(0, state(0), force=True, metrics={"loss": 1.0})
        for at in range(1, 20):

            def train(number, at=at):
                nonlocal saved
                if number == at:
                    saved += 1
                    training.save(saved, state(saved), force=True, metrics={"loss": 1.0 / (saved + 1)})
                    training.wait()

            with at_each_read(train):
                best = evaluation.best_step("loss")
            assert best is None or saved - 1 <= best <= saved
            assert evaluation.best_step("loss") == saved and not evaluation._run.steps.damaged


def test_damaged_step_counts_again_after_it_was_saved_again(tmp_path):
    fill(manager(tmp_path), 1, 2)
    next((tmp_path / "2").glob("*.distcp")).unlink()
    with manager(tmp_path) as reading:
        assert newest(reading) == 1 and reading.all_steps() == [1]
        fill(manager(tmp_path), 2)
        assert reading.all_steps() == [1, 2] and newest(reading) == 2


# Errors of access


def test_read_that_fails_once_never_makes_restore_latest_take_an_older_step(tmp_path):
    fill(manager(tmp_path), 100, 200, 300)
    at = 0
    while True:
        at += 1

        def fail(number, at=at):
            if number == at:
                raise PermissionError(errno.EACCES, "not now")

        with manager(tmp_path) as reading:
            with pytest.MonkeyPatch.context() as patched, at_each_read(fail) as count:
                patched.setattr("torch_xla_ckpt.manager.retries._PAUSE", 0.001)
                try:
                    assert newest(reading) == 300
                except xc.CheckpointError as error:  # while the data is read, nothing is tried again
                    assert "not now" in str(error)
            assert reading.all_steps() == [100, 200, 300] and newest(reading) == 300
        if count[0] < at:
            break
    assert at > 8, "the test must have seen every read"


def test_error_names_the_step_if_the_storage_does_not_answer(tmp_path, monkeypatch):
    fill(manager(tmp_path), 1, 2)
    monkeypatch.setattr("torch_xla_ckpt.manager.retries._PAUSE", 0.001)
    size = files.LocalFolder.size

    def denied(self, name):
        if self.url.endswith("/2"):
            raise PermissionError(errno.EACCES, "denied", name)
        return size(self, name)

    with manager(tmp_path) as reading, monkeypatch.context() as patched:
        patched.setattr(files.LocalFolder, "size", denied)
        for call in (lambda: newest(reading), reading.all_steps, reading.latest_step, lambda: reading.restore(2, {})):
            os.utime(tmp_path / "2" / ".metadata")  # so that it has to be looked at again
            with pytest.raises(xc.CheckpointError, match=r"(?s)step 2 of .*failed 3 times.*PermissionError.*denied"):
                call()
        patched.undo()
        assert newest(reading) == 2


# Damage


@pytest.mark.parametrize("gone", ["manifest*", "*.distcp", ".metadata-emptied", "*"])
def test_restore_latest_raises_if_the_only_step_lost_files(tmp_path, gone, caplog):
    fill(manager(tmp_path), 500)
    if gone == ".metadata-emptied":
        (tmp_path / "500" / ".metadata").write_bytes(b"")
    else:
        for file in (tmp_path / "500").glob(gone):
            if file.name != ".metadata":
                file.unlink()
    with manager(tmp_path, max_to_keep=1) as reading:
        with pytest.raises(xc.CheckpointError, match=r"(?s)none of them can be restored:.*500: .*another path"):
            newest(reading)
        assert "was not written by a checkpoint manager" not in caplog.text
        left = sorted(os.listdir(tmp_path / "500"))
        reading.save(501, state(501), force=True)
        reading.wait()
        assert sorted(os.listdir(tmp_path / "500")) == left  # kept to be looked at


@pytest.mark.parametrize("method", ["save", "save_async"])
def test_saves_ask_the_should_save_of_a_subclass(tmp_path, method):
    class Even(xc.CheckpointManager):
        def should_save(self, step):
            return super().should_save(step) and step % 2 == 0

    with Even(tmp_path, 1) as saving:
        assert [getattr(saving, method)(step, state(step)) for step in range(3)] == [True, False, True]
        saving.wait()
        assert saving.all_steps() == [0, 2]


def test_warning_names_unfinished_folders_if_a_run_has_no_committed_step(tmp_path, caplog):
    fill(manager(tmp_path), 3)
    (tmp_path / "3" / ".metadata").unlink()
    next((tmp_path / "3").glob("manifest-*")).unlink()
    with manager(tmp_path) as reading:
        assert newest(reading) is None
    assert "has no committed step" in caplog.text and ": 3" in caplog.text


@pytest.mark.parametrize("keep", [xc.keep.Latest(2), xc.keep.Latest(2) | xc.keep.Every(steps=1000)])
def test_damaged_step_does_not_replace_a_whole_step_in_a_policy(tmp_path, keep):
    fill(manager(tmp_path), *range(1, 7))
    next((tmp_path / "5").glob("manifest*")).unlink()
    next((tmp_path / "6").glob("*.distcp")).unlink()
    with manager(tmp_path, keep=keep) as saving:
        saving.save(7, state(7), force=True)
        saving.wait()
        assert [int(name) for name in sorted(os.listdir(tmp_path)) if name.isdigit()] == [4, 5, 6, 7]
        assert newest(saving) == 7


ODD = [
    None,
    3,
    "text",
    [],
    {KEY: None},
    {KEY: []},
    {KEY: {"metrics": None}},
    {KEY: {"metrics": [1]}},
    {KEY: {"metrics": {"loss": "x"}, "metadata": 1}},
    {KEY: {"metrics": {"loss": None, "accuracy": 0.5}}},
]


@pytest.mark.parametrize("odd", ODD, ids=map(json.dumps, ODD))
def test_every_method_works_with_user_metadata_of_another_shape(tmp_path, odd):
    fill(manager(tmp_path), 1)
    xc.save(state(2), tmp_path / "2", step=2, user_metadata=odd, sync=False)
    keep = xc.keep.Best(1, "loss") | xc.keep.Every(hours=1) | xc.keep.Latest(2)
    with manager(tmp_path, keep=keep) as saving:
        assert newest(saving) == 2 and saving.all_steps() == [1, 2]
        assert set(saving.metrics(2)) <= {"accuracy"} and saving.best_step() is None
        assert [one.kept for one in saving.plan_retention()] == [True, True]
        saving.save(3, state(3), force=True, metrics={"loss": 1.0})
        saving.wait()
        assert saving.best_step() == 3


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values, json_values)
def test_policies_work_with_the_facts_of_any_manifest(user, ours, time):
    for found in (user, {KEY: ours}, {KEY: {"metrics": ours}}):
        manifest = Manifest("0" * 16, time, 1, found, {}, None, {"f": 3})
        one = facts_of(1, manifest).saved
        policy = xc.keep.Best(1, "loss") | xc.keep.Every(hours=1) | xc.keep.Newer(datetime.now(timezone.utc))
        policy.wanted([one], datetime.now(timezone.utc))
        assert all(isinstance(value, (int, float)) for value in one.metrics.values())


@pytest.mark.parametrize("time", ["2020-01-01T00:00:00", "2020-01-01T00:00:00+02:00", "yesterday", None])
def test_time_without_a_zone_counts_as_utc_and_other_text_as_unknown(time):
    found = facts_of(1, Manifest("0" * 16, time, 1, None, {}, None, {})).saved.time
    assert found is None if time in ("yesterday", None) else found.tzinfo is not None


# Right after a save


@pytest.mark.parametrize("method", METHODS)
def test_superfluous_step_is_no_longer_listed_when_the_save_has_ended(tmp_path, method, monkeypatch):
    """Its files are deleted later. The test delays that until it has looked."""
    held, clear = threading.Event(), xc.manager.deletion.StepDeletion.clear

    def slow(self, *args, **kwargs):
        assert held.wait(60)
        return clear(self, *args, **kwargs)

    monkeypatch.setattr(xc.manager.deletion.StepDeletion, "clear", slow)
    with manager(tmp_path, max_to_keep=2) as saving, manager(tmp_path) as other:
        for step in range(3):
            getattr(saving, method)(step, state(step), force=True)
            saving._stager.wait()
        assert saving.all_steps() == other.all_steps() == [1, 2]
        held.set()
        saving.wait()
        assert not (tmp_path / "0").exists()


# Failed saves


@pytest.mark.parametrize("method", METHODS)
def test_failed_save_does_not_count_for_when_policies(tmp_path, method, monkeypatch):
    policies = {"first": xc.when.First(), "seconds": xc.when.Every(seconds=3600)}
    with manager(tmp_path / "first", when=policies["first"]) as first:
        with monkeypatch.context() as patched:
            patched.setattr(xc.ShardWriter, "write_data", failing)
            with pytest.raises(xc.CheckpointError, match="disk on fire"):
                getattr(first, method)(1, state(1))
                first.wait()
        assert first.should_save(2)
        assert getattr(first, method)(2, state(2)) and not first.should_save(3)
        first.wait()
    with manager(tmp_path / "seconds", when=policies["seconds"]) as timed:
        timed._schedule._agreement._saves[0] = xc.manager.agreement._Save(0, None, -4000.0, 0.0, False)  # an hour ago
        with monkeypatch.context() as patched:
            patched.setattr(xc.ShardWriter, "write_data", failing)
            with pytest.raises(xc.CheckpointError, match="disk on fire"):
                getattr(timed, method)(1, state(1))
                timed.wait()
        assert getattr(timed, method)(1, state(1))
        timed.wait()
        assert not timed.should_save(2) and timed.all_steps() == [1]


@pytest.mark.parametrize("method", METHODS)
def test_failed_save_on_preemption_is_repeated(tmp_path, method, monkeypatch):
    with xc.CheckpointManager(tmp_path, 1000) as saving:
        assert not saving.should_save(1)
        saving._preemption._sigterm.received = True
        with monkeypatch.context() as patched:
            patched.setattr(xc.ShardWriter, "write_data", failing)
            with pytest.raises(xc.CheckpointError, match="disk on fire"):
                getattr(saving, method)(2, state(2))
                saving.wait()
        assert saving.reached_preemption(3) and getattr(saving, method)(3, state(3))
        saving.wait()
        assert not getattr(saving, method)(4, state(4)) and saving.all_steps() == [3]


def test_step_numbers_must_be_integers(tmp_path):
    with manager(tmp_path) as saving:
        saving.save(True, state(1), force=True)
        saving.save(10**30, state(2), force=True)
        assert saving.all_steps() == [1, 10**30]
        for odd in ("5", 1.0, None):
            with pytest.raises(TypeError):
                saving.save(odd, state(1), force=True)


# The journal


@pytest.mark.parametrize(
    "line",
    [
        b"123",
        b"null",
        b"[]",
        b'"saved"',
        b"\0" * 100,
        b"\xff\xfe",
        b'{"event":"saved"}',
        b'{"event":"saved","step":"x"',
        b"[" * 200_000,
    ],
    ids=lambda line: repr(line[:20]),
)
def test_history_ignores_lines_that_are_not_saves(tmp_path, line):
    fill(manager(tmp_path), 1)
    with open(tmp_path / "journal.jsonl", "ab") as journal:
        journal.write(line + b"\n")
    fill(manager(tmp_path), 2)
    with manager(tmp_path) as reading:
        assert [one.step for one in reading.history()] == [1, 2]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "journal.jsonl").write_bytes(line + b"\n")
    with (
        manager(tmp_path / "other", initial_path=tmp_path / "empty") as reading,
        pytest.raises(xc.CheckpointError, match="holds neither a step of a run nor a checkpoint"),
    ):
        reading.restore_latest(state(0))


def test_journal_keeps_lines_in_memory_while_it_cannot_be_written(tmp_path, caplog):
    with manager(tmp_path) as saving:
        (tmp_path / "journal.jsonl").mkdir()
        for step in (1, 2):
            saving.save(step, state(step), force=True)
            saving.wait()
        assert "could not be written" in caplog.text and saving.all_steps() == [1, 2]
        (tmp_path / "journal.jsonl").rmdir()
        saving.save(3, state(3), force=True)
        saving.wait()
        assert [one.step for one in saving.history()] == [1, 2, 3]
        (tmp_path / "journal.jsonl").rename(tmp_path / "before")
        (tmp_path / "journal.jsonl").mkdir()
        saving.save(4, state(4), force=True)
    assert "is lost" in caplog.text and '"step": 4' in caplog.text  # said at the end, with its content


# Where a run starts


def test_initial_path_loads_the_newest_whole_step_of_the_other_run(tmp_path, caplog):
    fill(manager(tmp_path / "a"), 5, 6, 7)
    next((tmp_path / "a" / "7").glob("*.distcp")).unlink()
    next((tmp_path / "a" / "6").glob("manifest*")).unlink()
    with manager(tmp_path / "b", initial_path=tmp_path / "a") as beginning:
        target = state(-1)
        assert beginning.restore_latest(target) is None and target["n"] == 5
    assert "step 7 of" in caplog.text and "step 6 of" in caplog.text
    next((tmp_path / "a" / "5").glob("*.distcp")).unlink()
    damaged = pytest.raises(xc.CheckpointError, match="none of them can be restored")
    with manager(tmp_path / "c", initial_path=tmp_path / "a") as beginning, damaged:
        beginning.restore_latest(state(-1))


@pytest.mark.parametrize("length", [1, 3])
def test_initial_path_follows_a_chain_of_runs_without_steps(tmp_path, length):
    fill(manager(tmp_path / "0"), 5)
    for number in range(1, length + 2):
        with manager(tmp_path / str(number), initial_path=tmp_path / str(number - 1)) as beginning:
            target = state(-1)
            assert beginning.restore_latest(target) is None and target["n"] == 5


def test_initial_path_without_a_run_or_checkpoint_is_an_error(tmp_path):
    for path in (tmp_path / "nothing", tmp_path / "round"):
        nothing = pytest.raises(xc.CheckpointError, match="holds neither a step of a run nor a checkpoint")
        with manager(path.with_name("new"), initial_path=path) as beginning, nothing:
            beginning.restore_latest(state(-1))
        with manager(tmp_path / "round") as there:
            there._run.journal.write("began", source=str(tmp_path / "round"))


# Memory, and several managers


def test_manager_forgets_deleted_steps(tmp_path):
    keep = xc.keep.Best(1, "loss") | xc.keep.Latest(2)
    with manager(tmp_path, keep=keep) as saving:
        for step in range(30):
            saving.save(step, state(step), force=True, metrics={"loss": -step})
            saving.wait()
            saving.all_steps()
        memory = saving._run.steps._memory
        assert max(len(memory.known), len(memory.own), len(memory.numbers)) <= 3
        assert not saving._run.active.steps() and len(saving._run.retention._pending) <= 3
        assert len(saving._schedule._agreement._saves) <= 64


def test_two_managers_of_one_run_see_each_others_steps(tmp_path):
    logging.getLogger("torch_xla_ckpt").setLevel(logging.NOTSET)
    with manager(tmp_path) as one, manager(tmp_path) as two:
        one.save(1, state(1), force=True)
        two.save(2, state(2), force=True)
        assert one.all_steps() == two.all_steps() == [1, 2]
        assert one.latest_step() == two.latest_step() == 2

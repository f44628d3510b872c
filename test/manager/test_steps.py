"""What a manager makes of the folders in a run: links, strangers, damage, deletions by others, odd manifests."""

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
    """Call ``act(number)`` before every read of a local folder in this thread; reads that it makes do not count."""
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


# Links.


def linked(path, elsewhere, step):
    shutil.move(path / str(step), elsewhere)
    (path / str(step)).symlink_to(elsewhere)


def test_a_step_that_is_a_link_to_a_folder_is_a_step(tmp_path):
    run = tmp_path / "run"
    fill(manager(run), 1, 2)
    linked(run, tmp_path / "disk", 2)
    with manager(run) as reading:
        assert reading.all_steps() == [1, 2] and reading.latest_step() == 2 and newest(reading) == 2


@pytest.mark.parametrize("with_notes", [False, True])
def test_deleting_a_linked_step_deletes_its_files_and_the_link_and_nothing_of_the_users(tmp_path, with_notes):
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


def test_a_link_that_leads_nowhere_is_no_step(tmp_path):
    fill(manager(tmp_path), 1)
    (tmp_path / "7").symlink_to(tmp_path / "gone")
    with manager(tmp_path, max_to_keep=1) as saving:
        assert saving.all_steps() == [1] and newest(saving) == 1
        saving.save(8, state(8), force=True)
    assert (tmp_path / "7").is_symlink()


# Folders of others.


@pytest.mark.parametrize("name", ["0", "5", "2024", "99999999999999999999"])
def test_an_empty_folder_of_the_users_is_never_removed(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "inner").mkdir()
    fill(manager(tmp_path, max_to_keep=1), 7, 8, 9)
    fill(manager(tmp_path, max_to_keep=1), 10)
    assert (tmp_path / name).is_dir() and (tmp_path / "6" / "inner").is_dir()
    assert not (tmp_path / "9").exists()  # which the manager emptied itself


# Another program deletes.


def test_a_step_deleted_at_any_moment_of_a_restore_is_not_damaged_and_none_older_is_taken(tmp_path, caplog):
    """At every read that an evaluation makes, the run saves its next step and deletes the one before."""
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
            assert evaluation.all_steps() == [saved] and not evaluation._steps.damaged
            if count[0] < at:
                break
        assert at > 8, "the test must have seen every read"
    assert not [record for record in caplog.records if "damaged" in record.getMessage()]


def test_metrics_and_the_best_step_do_not_fail_while_a_run_deletes(tmp_path):
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
            assert evaluation.best_step("loss") == saved and not evaluation._steps.damaged


def test_a_damaged_step_that_was_saved_again_counts_again(tmp_path):
    fill(manager(tmp_path), 1, 2)
    next((tmp_path / "2").glob("*.distcp")).unlink()
    with manager(tmp_path) as reading:
        assert newest(reading) == 1 and reading.all_steps() == [1]
        fill(manager(tmp_path), 2)
        assert reading.all_steps() == [1, 2] and newest(reading) == 2


# Errors of access.


def test_a_read_that_fails_once_never_takes_a_restore_back_to_an_older_step(tmp_path):
    fill(manager(tmp_path), 100, 200, 300)
    at = 0
    while True:
        at += 1

        def fail(number, at=at):
            if number == at:
                raise PermissionError(errno.EACCES, "not now")

        with manager(tmp_path) as reading:
            with pytest.MonkeyPatch.context() as patched, at_each_read(fail) as count:
                patched.setattr("torch_xla_ckpt.manager.steps._PAUSE", 0.001)
                try:
                    assert newest(reading) == 300
                except xc.CheckpointError as error:  # while the data is read, nothing is tried again
                    assert "not now" in str(error)
            assert reading.all_steps() == [100, 200, 300] and newest(reading) == 300
        if count[0] < at:
            break
    assert at > 8, "the test must have seen every read"


def test_a_store_that_does_not_answer_is_an_error_that_names_the_step(tmp_path, monkeypatch):
    fill(manager(tmp_path), 1, 2)
    monkeypatch.setattr("torch_xla_ckpt.manager.steps._PAUSE", 0.001)
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


# Damage.


@pytest.mark.parametrize("gone", ["manifest*", "*.distcp", ".metadata-emptied", "*"])
def test_a_run_whose_only_step_lost_files_does_not_begin_anew_by_mistake(tmp_path, gone, caplog):
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


def test_leftovers_without_a_step_are_named_when_a_run_begins_anew(tmp_path, caplog):
    fill(manager(tmp_path), 3)
    (tmp_path / "3" / ".metadata").unlink()
    with manager(tmp_path) as reading:
        assert newest(reading) is None
    assert "has no committed step" in caplog.text and ": 3" in caplog.text


@pytest.mark.parametrize("keep", [xc.keep.Latest(2), xc.keep.Latest(2) | xc.keep.Every(steps=1000)])
def test_a_damaged_step_takes_no_place_in_a_policy_though_nobody_has_restored_it(tmp_path, keep):
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
def test_user_metadata_of_another_shape_stops_no_method(tmp_path, odd):
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
def test_any_manifest_gives_facts_that_every_policy_understands(user, ours, time):
    for found in (user, {KEY: ours}, {KEY: {"metrics": ours}}):
        manifest = Manifest("0" * 16, time, 1, found, {}, None, {"f": 3})
        one = facts_of(1, manifest).saved
        policy = xc.keep.Best(1, "loss") | xc.keep.Every(hours=1) | xc.keep.Newer(datetime.now(timezone.utc))
        policy.wanted([one], datetime.now(timezone.utc))
        assert all(isinstance(value, (int, float)) for value in one.metrics.values())


@pytest.mark.parametrize("time", ["2020-01-01T00:00:00", "2020-01-01T00:00:00+02:00", "yesterday", None])
def test_a_time_without_a_zone_is_utc_and_another_one_is_not_known(time):
    found = facts_of(1, Manifest("0" * 16, time, 1, None, {}, None, {})).saved.time
    assert found is None if time in ("yesterday", None) else found.tzinfo is not None


# Right after a save.


@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_is_not_kept_is_gone_when_the_save_has_ended(tmp_path, method, monkeypatch):
    """Its files may follow: they are held here until the test has looked."""
    held, clear = threading.Event(), xc.manager.steps.Steps.clear

    def slow(self, *args, **kwargs):
        assert held.wait(60)
        return clear(self, *args, **kwargs)

    monkeypatch.setattr(xc.manager.steps.Steps, "clear", slow)
    with manager(tmp_path, max_to_keep=2) as saving, manager(tmp_path) as other:
        for step in range(3):
            getattr(saving, method)(step, state(step), force=True)
            saving._stager.wait()
        assert saving.all_steps() == other.all_steps() == [1, 2]
        held.set()
        saving.wait()
        assert not (tmp_path / "0").exists()


# A save that failed.


@pytest.mark.parametrize("method", METHODS)
def test_a_failed_save_does_not_count(tmp_path, method, monkeypatch):
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
        timed._agreement._marks[0] = xc.manager.agreement._Mark(0, None, -4000.0, 0.0, False)  # an hour ago
        with monkeypatch.context() as patched:
            patched.setattr(xc.ShardWriter, "write_data", failing)
            with pytest.raises(xc.CheckpointError, match="disk on fire"):
                getattr(timed, method)(1, state(1))
                timed.wait()
        assert getattr(timed, method)(1, state(1))
        timed.wait()
        assert not timed.should_save(2) and timed.all_steps() == [1]


@pytest.mark.parametrize("method", METHODS)
def test_a_save_on_preemption_that_failed_is_made_again(tmp_path, method, monkeypatch):
    with xc.CheckpointManager(tmp_path, 1000) as saving:
        assert not saving.should_save(1)
        saving._terminated.received = True
        with monkeypatch.context() as patched:
            patched.setattr(xc.ShardWriter, "write_data", failing)
            with pytest.raises(xc.CheckpointError, match="disk on fire"):
                getattr(saving, method)(2, state(2))
                saving.wait()
        assert saving.reached_preemption(3) and getattr(saving, method)(3, state(3))
        saving.wait()
        assert not getattr(saving, method)(4, state(4)) and saving.all_steps() == [3]


def test_numbers_are_numbers(tmp_path):
    with manager(tmp_path) as saving:
        saving.save(True, state(1), force=True)
        saving.save(10**30, state(2), force=True)
        assert saving.all_steps() == [1, 10**30]
        for odd in ("5", 1.0, None):
            with pytest.raises(TypeError):
                saving.save(odd, state(1), force=True)


# The journal.


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
def test_lines_that_are_no_record_are_left_out_of_the_history(tmp_path, line):
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


def test_records_wait_for_a_journal_that_cannot_be_written(tmp_path, caplog):
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


# Beginnings.


def test_a_run_begins_with_the_newest_step_of_another_that_is_whole(tmp_path, caplog):
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
def test_a_chain_of_runs_that_saved_nothing_leads_to_the_first(tmp_path, length):
    fill(manager(tmp_path / "0"), 5)
    for number in range(1, length + 2):
        with manager(tmp_path / str(number), initial_path=tmp_path / str(number - 1)) as beginning:
            target = state(-1)
            assert beginning.restore_latest(target) is None and target["n"] == 5


def test_an_initial_path_that_holds_nothing_is_an_error(tmp_path):
    for path in (tmp_path / "nothing", tmp_path / "round"):
        nothing = pytest.raises(xc.CheckpointError, match="holds neither a step of a run nor a checkpoint")
        with manager(path.with_name("new"), initial_path=path) as beginning, nothing:
            beginning.restore_latest(state(-1))
        with manager(tmp_path / "round") as there:
            there._journal.write("began", source=str(tmp_path / "round"))


# Memory and policies.


def test_nothing_is_remembered_of_steps_that_are_gone(tmp_path):
    keep = xc.keep.Best(1, "loss") | xc.keep.Latest(2)
    with manager(tmp_path, keep=keep) as saving:
        for step in range(30):
            saving.save(step, state(step), force=True, metrics={"loss": -step})
            saving.wait()
            saving.all_steps()
        memory = saving._steps._memory
        assert max(len(memory.known), len(memory.own), len(memory.numbers)) <= 3
        assert not saving._under_way.steps() and len(saving._retention._pending) <= 3
        assert len(saving._agreement._marks) <= 64


def test_two_managers_in_one_program_do_not_disturb_each_others_steps(tmp_path):
    logging.getLogger("torch_xla_ckpt").setLevel(logging.NOTSET)
    with manager(tmp_path) as one, manager(tmp_path) as two:
        one.save(1, state(1), force=True)
        two.save(2, state(2), force=True)
        assert one.all_steps() == two.all_steps() == [1, 2]
        assert one.latest_step() == two.latest_step() == 2

"""Retention: which steps are deleted, in which order, and what stays whatever happens."""

import json
import os

import pytest
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support.runs import save_steps, state
from torch_xla_ckpt.manager.deletion import StepDeletion
from torch_xla_ckpt.storage import files

pytestmark = pytest.mark.filterwarnings("ignore")


def test_plan_retention_gives_reasons_and_deletes_nothing(tmp_path):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        for step in range(1, 8):
            save_steps(manager, step, metrics={"loss": abs(step - 3)})
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


def test_checkpoints_that_no_manager_wrote_are_listed_and_never_deleted(tmp_path, caplog):
    xc.save(state(3), tmp_path / "3", step=3, user_metadata={"metrics": {"loss": 0}})
    dcp.save(state(4), checkpoint_id=tmp_path / "4", no_dist=True)
    xc.save(state(2024), tmp_path / "2024")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        assert manager.all_steps() == [3, 4, 2024] and manager.restore_latest(state(0)) == 2024
        target = state(0)
        manager.restore(4, target)
        assert target["n"] == 4
        save_steps(manager, 10)
        save_steps(manager, 20)
        assert manager.all_steps() == [3, 4, 20, 2024], "what others wrote must not push out what was just saved"
        assert all(one.kept for one in manager.plan_retention())
        save_steps(manager, 3000, 3001)
        assert manager.all_steps() == [3, 4, 2024, 3001]
        reasons = {one.step: one.reason for one in manager.plan_retention()}
    assert reasons[3] == "no policy wants it, but no CheckpointManager wrote it, so it is yours to delete"
    assert reasons[3] == reasons[4] == reasons[2024] and reasons[3001] == "one of the latest 1"
    assert all(path.read_bytes() == content for path, content in before.items())
    said = [r.getMessage() for r in caplog.records if "no policy wants the steps" in r.getMessage()]
    assert [text.split(" of ")[0].split(" steps ")[1] for text in said] == ["3, 4", "2024"]
    assert all("delete their folders yourself" in text and str(tmp_path) in text for text in said)


def test_newest_step_stays_even_if_no_policy_wants_it(tmp_path):
    with xc.CheckpointManager(tmp_path, 1, keep=lambda one: False) as manager:
        for step in range(3):
            save_steps(manager, step)
            assert manager.all_steps() == [step]
        assert "the newest that can be restored" in manager.plan_retention()[0].reason


def test_no_step_is_deleted_if_the_new_step_cannot_be_read_back(tmp_path, monkeypatch, caplog):
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        save_steps(manager, 1)
        steps = type(manager._run.steps)
        flaw = steps.flaw
        monkeypatch.setattr(steps, "flaw", lambda *a, **k: "its manifest is gone" if a[1] == 2 else flaw(*a, **k))
        save_steps(manager, 2)
        assert "cannot be read back: its manifest is gone" in caplog.text
        assert (tmp_path / "1" / ".metadata").exists()


def test_saving_an_older_step_again_does_not_delete_newer_steps(tmp_path):
    """A run that was restored to step 2 saves step 3 again. Step 9 is newer, so it stays."""
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        save_steps(manager, 9)
        save_steps(manager, 3)
        assert manager.all_steps() == [3, 9]


def test_failed_deletion_is_repeated_and_reported(tmp_path, monkeypatch, caplog):
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
        save_steps(manager, 1)
        monkeypatch.setattr(files, "os", Stubborn())
        save_steps(manager, 2)
        assert manager.all_steps() == [2] and "could not be deleted (attempt 2 of 3)" in caplog.text
        save_steps(manager, 1)
        failures = 100
        manager.save(3, state(3))
        manager.wait()
        assert manager.all_steps() == [1, 3]
        assert any(event["event"] == "failed to delete" for event in manager._run.journal.events())
        failures = 0
        save_steps(manager, 4)  # and goes on after the next save
        assert manager.all_steps() == [4]


def test_leftovers_of_unfinished_saves_and_deletions_are_deleted_and_nothing_else(tmp_path):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        save_steps(manager, 1, 2, 3)
        for step in (1, 2):  # deletions that broke off
            StepDeletion(manager._run.steps).retire(step)
    (tmp_path / "2" / "notes.txt").write_text("mine")
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "__0_0.distcp").write_bytes(b"")  # another program may be about to commit this
    with xc.CheckpointManager(tmp_path, 1) as manager:
        assert manager.all_steps() == [3] and manager.restore_latest(state(0)) == 3
        assert (tmp_path / "1").exists()  # a program that only restores deletes nothing
        save_steps(manager, 4)
        assert manager.all_steps() == [3, 4] and not (tmp_path / "1").exists()
        assert (tmp_path / "2" / "notes.txt").exists() and (tmp_path / "9" / "__0_0.distcp").exists()
        assert len(list((tmp_path / "2").iterdir())) > 1


def test_a_step_that_has_lost_only_its_metadata_is_named_and_stays(tmp_path, caplog):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        save_steps(manager, 1, 2)
    (tmp_path / "1" / ".metadata").rename(tmp_path / "copy")
    (row,) = [row for row in xc.inspect(tmp_path).steps if row.step == 1]
    assert row.kind == "damaged" and "all other files of the committed save" in row.flaw
    files = sorted((tmp_path / "1").iterdir())
    with xc.CheckpointManager(tmp_path, 1, max_to_keep=1) as manager:
        save_steps(manager, 3)
        assert manager.all_steps() == [3] and sorted((tmp_path / "1").iterdir()) == files
        assert caplog.text.count("1 has lost its .metadata, and all other files of the committed save") == 1
    (tmp_path / "copy").rename(tmp_path / "1" / ".metadata")
    with xc.CheckpointManager(tmp_path, 1) as manager:
        found = state(0)
        manager.restore(1, found)
        assert found["n"] == 1 and manager.all_steps() == [1, 3]


def test_a_commit_that_cannot_be_deleted_keeps_no_mark_of_a_deletion(tmp_path, monkeypatch):
    def unlink(path):
        if str(path).endswith(".metadata"):
            raise PermissionError("not now")
        os.remove(path)

    with xc.CheckpointManager(tmp_path, 1) as manager:
        save_steps(manager, 1)
        before = sorted((tmp_path / "1").iterdir())
        monkeypatch.setattr(files.os, "unlink", unlink)
        with pytest.raises(PermissionError):
            StepDeletion(manager._run.steps).retire(1)
        assert sorted((tmp_path / "1").iterdir()) == before


def test_steps_with_nan_are_deleted_without_a_word_of_missing_metrics(tmp_path, caplog):
    with xc.CheckpointManager(tmp_path, 1) as manager:
        for step, loss in enumerate([1.0, float("nan"), float("nan"), float("nan")]):
            save_steps(manager, step, metrics={"loss": loss})
    with xc.CheckpointManager(tmp_path, 1, keep=xc.keep.Latest(1) | xc.keep.Best(1, "loss")) as manager:
        save_steps(manager, 4, metrics={"loss": float("nan")})
        assert manager.all_steps() == [0, 4] and "all steps are kept" not in caplog.text


def test_nothing_is_deleted_while_no_step_has_the_metric_of_a_policy(tmp_path, caplog):
    keep = xc.keep.Latest(1) | xc.keep.Best(1, "los")
    with xc.CheckpointManager(tmp_path, 1, keep=keep) as manager:
        for step, loss in enumerate([1.0, 0.5, 2.0]):
            save_steps(manager, step, metrics={"loss": loss})
        assert manager.all_steps() == [0, 1, 2]
        assert caplog.text.count("no step") == 1 and "'los'" in caplog.text and "the metrics 'loss'" in caplog.text
        assert {one.reason for one in manager.plan_retention() if one.step < 2} == {"no step has the metric 'los' yet"}
        save_steps(manager, 3, metrics={"los": 7})
        save_steps(manager, 4, metrics={"los": 8})
        assert manager.all_steps() == [3, 4]

"""xc verify of a run: steps that lost their commit are damaged; saves and deletions that broke off are unfinished."""

import json
import shutil
import signal

import pytest

from support import interpreters
from support.command_line import call
from torch_xla_ckpt.inspecting import checking

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run(made, tmp_path):
    """A copy of a run with the steps 10, 20 and 30."""
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def note(run, event, step):
    with open(run / "journal.jsonl", "a") as journal:
        journal.write(json.dumps({"time": "2026-01-01T00:00:00+00:00", "event": event, "step": step}) + "\n")


@pytest.mark.parametrize("step", [10, 30])
@pytest.mark.parametrize("journal", [True, False])
def test_a_committed_step_that_lost_its_metadata_is_damaged(run, step, journal):
    (run / str(step) / ".metadata").unlink()
    if not journal:
        (run / "journal.jsonl").unlink()
    answer = call("verify", run)
    assert answer.status == 1, answer.out
    assert f"DAMAGED  {run / str(step)}" in answer.out and ".metadata is missing" in answer.out
    assert answer.lines[-1] == "3 checkpoints, 1 damaged"
    found = call("verify", run, "--json").json
    assert [check["path"] for check in found["checks"] if not check["ok"]] == [str(run / str(step))]
    assert found["unfinished"] == []


def test_a_run_whose_only_step_lost_its_metadata_is_damaged(run):
    for step in (10, 20):
        shutil.rmtree(run / str(step))
    (run / "30" / ".metadata").unlink()
    assert call("verify", run).status == 1


def test_the_newest_step_that_lost_more_than_its_metadata_is_damaged(run):
    (run / "30" / ".metadata").unlink()
    next((run / "30").glob("manifest-*")).unlink()
    answer = call("verify", run)
    assert answer.status == 1 and "journal says" in answer.out


def test_a_step_of_torch_xla_that_lost_its_metadata_is_damaged(made, run):
    shutil.copytree(made / "torch_xla", run / "40")
    (run / "40" / ".manager_metadata").write_bytes(b"step and time")
    (run / "40" / ".metadata").unlink()
    answer = call("verify", run)
    assert answer.status == 1 and "torch_xla's manager" in answer.out


KILLED = """
import os, signal, sys, torch
import torch_xla_ckpt as xc
real = os.replace
def replace(source, target, *rest, **options):
    if os.path.basename(target) == ".metadata":
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target, *rest, **options)
os.replace = replace
xc.save({{"w": torch.ones(1000)}}, {path!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [15, 40])
def test_a_killed_save_is_unfinished_and_fails_nothing(run, step):
    program = KILLED.format(path=str(run / str(step)))
    done = interpreters.run(["-c", program])
    assert done.returncode == -signal.SIGKILL
    assert list((run / str(step)).glob("manifest-*"))
    answer = call("verify", run)
    assert answer.status == 0, answer.out
    assert f"unfinished  {run / str(step)}" in answer.out
    assert answer.lines[-1] == "3 checkpoints, none damaged, 1 unfinished"
    (unfinished,) = call("verify", run, "--json").json["unfinished"]
    assert unfinished["path"] == str(run / str(step)) and unfinished["nbytes"] > 4000


@pytest.mark.parametrize("event", ["deleted", "failed to delete", "removed leftovers"])
def test_files_of_a_deleted_step_are_not_damage(run, event):
    (run / "10" / ".metadata").unlink()
    note(run, event, 10)
    answer = call("verify", run)
    assert answer.status == 0 and answer.lines[-1] == "2 checkpoints, none damaged, 1 unfinished"


def test_a_deletion_that_broke_off_is_not_damage(run):
    (run / "10" / ".metadata").unlink()
    next((run / "10").glob("*.distcp")).unlink()
    answer = call("verify", run)
    assert answer.status == 0 and f"unfinished  {run / '10'}" in answer.out


def test_a_deletion_under_way_is_not_damage(run, monkeypatch):
    (run / "10" / ".metadata").unlink()
    real = checking.verify

    def verify(*arguments, **options):  # meanwhile, the deletion goes on
        shutil.rmtree(run / "10", ignore_errors=True)
        return real(*arguments, **options)

    monkeypatch.setattr(checking, "verify", verify)
    answer = call("verify", run)
    assert answer.status == 0 and answer.lines[-1] == "2 checkpoints, none damaged"


def test_folders_without_files_of_a_checkpoint_are_not_named(run):
    (run / "40").mkdir()
    (run / "50").mkdir()
    (run / "50" / "notes.txt").write_text("mine")
    answer = call("verify", run)
    assert answer.status == 0 and answer.lines[-1] == "3 checkpoints, none damaged"

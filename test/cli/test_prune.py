"""xc prune: it shows what policies would delete, and deletes with --yes only."""

import json
import shutil
from dataclasses import dataclass, field

import pytest

import torch_xla_ckpt as xc
from support.command_line import call
from torch_xla_ckpt.inspecting import Pruning, prune, require_deleted
from torch_xla_ckpt.manager import run_folder

pytestmark = pytest.mark.filterwarnings("ignore")


def steps_of(run):
    return sorted(int(path.name) for path in run.iterdir() if path.name.isdigit())


def test_prune_shows_and_deletes_only_with_yes(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    policies = ("--keep", "latest:1", "--keep", "best:1:accuracy:max")
    shown = call("prune", run, *policies)
    assert shown.status == 0 and "would be deleted" in shown.out and steps_of(run) == [10, 20, 30]
    done = call("prune", run, *policies, "--yes", "--json")
    assert done.status == 0 and done.json["deleted"] == [10] and steps_of(run) == [20, 30]
    assert call("verify", run).status == 0
    last = json.loads((run / "journal.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"]) == ("deleted", 10)
    assert call("prune", run, *policies, "--yes", "--json").json["deleted"] == []


def test_prune_decides_as_the_manager_would(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    found = call("prune", run, "--keep", "latest:2", "--json").json["verdicts"]
    with xc.CheckpointManager(run, 1, keep=xc.keep.Latest(2)) as manager:
        assert [(one.step, one.kept, one.reason) for one in manager.plan_retention()] == [
            (one["step"], one["kept"], one["reason"]) for one in found
        ]


def test_prune_never_deletes_what_no_manager_wrote_nor_the_last_whole_step(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    shutil.copytree(made / "stock", run / "5")
    for step in ("20", "30"):
        next((run / step).glob("*.distcp")).unlink()
    call("prune", run, "--keep", "latest:1", "--yes")
    assert steps_of(run) == [5, 10, 20, 30]


def test_prune_deletes_nothing_if_the_newest_step_is_damaged(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    file = next((run / "30").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    answer = call("prune", run, "--keep", "latest:1", "--yes")
    assert answer.status == 2 and "30, is damaged" in answer.err and steps_of(run) == [10, 20, 30]
    shutil.rmtree(run / "30")
    assert call("prune", run, "--keep", "latest:1", "--yes").status == 0 and steps_of(run) == [20]


@dataclass(frozen=True)
class Counting(xc.keep.Latest):
    """A policy that records each time it is asked."""

    asked: list = field(default_factory=list)

    def wanted(self, saved, now):
        self.asked.append([one.step for one in saved])
        return super().wanted(saved, now)


def test_prune_deletes_exactly_what_its_only_plan_says(made, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    whole = run_folder.verify
    policy = Counting(1)

    def changed_meanwhile(location):
        """A training program saves another step and deletes one, while the newest step is read."""
        shutil.copytree(run / "30", run / "40")
        shutil.rmtree(run / "10")
        return whole(location)

    monkeypatch.setattr(run_folder, "verify", changed_meanwhile)
    found = prune(run, policy, delete=True)
    assert policy.asked == [[10, 20, 30]]
    assert [one.step for one in found.verdicts if not one.kept] == [10, 20]
    assert steps_of(run) == [30, 40] and set(found.deleted) == {10, 20}


def test_prune_deletes_nothing_if_the_newest_step_goes_while_it_is_read(made, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    whole = run_folder.verify

    def gone_afterwards(location):
        report = whole(location)
        shutil.rmtree(run / "30")
        return report

    monkeypatch.setattr(run_folder, "verify", gone_afterwards)
    found = prune(run, xc.keep.Latest(1), delete=True)
    assert steps_of(run) == [10, 20] and found.deleted == ()
    with pytest.raises(xc.CheckpointError, match=r"10, 20 .* could not be deleted"):
        require_deleted(found)


def test_prune_needs_a_policy_and_a_run(made):
    assert call("prune", made / "run").status == 2
    assert call("prune", made / "ours", "--keep", "latest:1").status == 2


def test_prune_names_steps_that_could_not_be_deleted():
    verdicts = (xc.Verdict(1, False, "no policy wants it"), xc.Verdict(2, True, "one of the latest 1"))
    require_deleted(Pruning("run", verdicts, {}, (1,), is_dry=False))
    require_deleted(Pruning("run", verdicts, {}))
    with pytest.raises(xc.CheckpointError, match="the steps 1 of run could not be deleted"):
        require_deleted(Pruning("run", verdicts, {}, (), is_dry=False))


@pytest.mark.parametrize("kind", ["stock", "torch_xla", "lightning"])
def test_prune_leaves_the_folders_of_others_alone(made, tmp_path, kind):
    for step in ("1", "2", "3"):
        shutil.copytree(made / kind, tmp_path / "run" / step)
    (tmp_path / "run" / "4").mkdir()
    (tmp_path / "run" / "4" / "notes.txt").write_text("mine")
    answer = call("prune", tmp_path / "run", "--keep", "latest:1", "--yes")
    assert answer.status == 0, answer.err
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4] and (tmp_path / "run" / "4" / "notes.txt").exists()


def test_prune_keeps_files_that_no_save_wrote(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    (run / "10" / "notes.txt").write_text("mine")
    assert call("prune", run, "--keep", "latest:1", "--yes").status == 0
    assert [path.name for path in (run / "10").iterdir()] == ["notes.txt"]

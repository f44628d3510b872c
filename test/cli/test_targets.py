"""Targets of xc convert and xc export: names of steps, files beside a checkpoint, and what a failure leaves."""

import datetime
import shutil
import signal

import pytest
import torch

import torch_xla_ckpt as xc
from support import interpreters, kinds
from support.command_line import call
from torch_xla_ckpt.storage import Location, open_folder, read_listing

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run(made, tmp_path):
    """A copy of a run with the steps 10, 20 (the best) and 30."""
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def folders(path):
    return sorted(one.name for one in path.iterdir() if one.is_dir())


def chunks(path):
    return {one["key"]: one["chunks"] for one in call("ls", path, "--json").json["keys"]}


@pytest.mark.parametrize(
    ("name", "step"),
    [("latest", 30), ("latest/", 30), ("best:loss", 20), ("best:accuracy:max", 20), ("best:loss:max", 30)],
)
def test_convert_onto_the_name_of_a_step_rewrites_that_step(made, run, name, step):
    before = {one: (run / str(one) / ".metadata").read_bytes() for one in (10, 20, 30)}
    options = ("--mesh", "a=2", "--spec", "*.weight=a", "--overwrite")
    answer = call("convert", f"{run}/{name}", f"{run}/{name}", *options, "--json")
    assert answer.status == 0, answer.err
    assert answer.json["target"] == answer.json["source"] == str(run / str(step))
    assert folders(run) == ["10", "20", "30"]
    assert {one for one in before if (run / str(one) / ".metadata").read_bytes() != before[one]} == {step}
    assert chunks(run / str(step))["model.layers.0.weight"] == 2
    assert call("diff", run / str(step), made / "run" / str(step)).status == 0
    assert call("verify", run).status == 0


def test_the_newest_step_is_rewritten_even_if_a_newer_one_appears_meanwhile(made, run, monkeypatch):
    real = Location.of.__func__
    paths = []

    def of(cls, path, *rest, **options):
        if str(path) == f"{run}/latest":
            paths.append(path)
            if len(paths) == 2:  # the source was opened; the target is next
                shutil.copytree(made / "run" / "20", run / "40")
        return real(cls, path, *rest, **options)

    monkeypatch.setattr(Location, "of", classmethod(of))
    answer = call("convert", f"{run}/latest", f"{run}/latest", "--overwrite", "--json")
    assert (run / "40").exists() and answer.json["target"] == str(run / "30")
    assert call("diff", run / "40", made / "run" / "20").status == 0


@pytest.mark.parametrize("name", ["latest", "best:loss", "best:accuracy:max"])
@pytest.mark.parametrize(
    "command",
    [
        ("convert",),
        ("convert", "--dry-run"),
        ("convert", "--to", "torch"),
        ("export", "--key", "model"),
        ("export", "--key", "model", "--dry-run"),
        ("export", "--to", "dcp"),
        ("export", "--to", "torch"),
    ],
)
def test_no_folder_gets_the_name_of_a_step(made, run, name, command):
    verb, *options = command
    answer = call(verb, made / "ours", run / name, *options)
    assert answer.status == 2 and len(answer.err.splitlines()) == 1 and "Nothing was written" in answer.err
    assert "Choose another path" in answer.err and "--debug" not in answer.err
    assert folders(run) == ["10", "20", "30"]


def test_the_name_of_no_step_is_refused(made, run):
    answer = call("convert", made / "ours", run / "best:nosuch", "--overwrite")
    assert answer.status == 2 and "nosuch" in answer.err and folders(run) == ["10", "20", "30"]


def test_outside_of_a_run_latest_is_a_folder_like_any_other(made, tmp_path):
    assert call("convert", made / "ours", tmp_path / "latest").status == 0
    assert call("diff", made / "ours", tmp_path / "latest").status == 0
    assert call("export", made / "ours", tmp_path / "best", "--key", "model").status == 0


def test_a_folder_with_the_name_of_a_step_does_not_hide_the_step(made, run):
    shutil.copytree(made / "ours", run / "latest")
    answer = call("ls", run / "latest", "--json")
    assert answer.json["path"] == str(run / "30")
    assert "step 30" in answer.err and "'latest'" in answer.err and "rename" in answer.err
    (run / "best:nosuch").mkdir()
    kinds.save_ours(run / "best:nosuch", {"w": torch.ones(1)})
    assert call("ls", run / "best:nosuch", "--json").json["path"] == str(run / "best:nosuch")


def test_a_link_to_the_newest_step_is_followed_without_a_warning(run):
    (run / "latest").symlink_to("30")
    answer = call("ls", run / "latest", "--json")
    assert answer.json["path"] == str(run / "30") and answer.err == ""


# The time of a step


def test_convert_keeps_the_time_of_the_save(run, tmp_path):
    saved = datetime.datetime(2020, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc)
    xc.save({"w": torch.ones(4)}, tmp_path / "old", storage_writer=xc.ShardWriter(tmp_path / "old", time=saved, step=7))
    for target, options in ((tmp_path / "new", ()), (tmp_path / "old", ("--overwrite",))):
        assert call("convert", tmp_path / "old", target, *options).status == 0
        found = call("ls", target, "--json").json
        assert (found["time"], found["step"]) == (saved.isoformat(), 7)
    before = read_listing(open_folder(Location.of(run / "10"))).time
    assert call("convert", run / "10", run / "10", "--overwrite").status == 0
    assert read_listing(open_folder(Location.of(run / "10"))).time == before


def test_convert_of_a_checkpoint_without_a_time_has_the_time_of_the_conversion(made, tmp_path):
    before = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    assert call("convert", made / "stock", tmp_path / "c").status == 0
    found = datetime.datetime.fromisoformat(call("ls", tmp_path / "c", "--json").json["time"])
    assert before <= found <= datetime.datetime.now(datetime.timezone.utc)


# Files beside a checkpoint


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("source", "target"), [("ours", "lightning"), ("lightning", "ours"), ("lightning", "stock")])
def test_a_checkpoint_and_the_meta_pt_of_another_never_lie_together(made, tmp_path, source, target):
    shutil.copytree(made / target, tmp_path / "c")
    before = contents(tmp_path / "c")
    for options in (("--overwrite",), ("--overwrite", "--dry-run")):
        answer = call("convert", made / source, tmp_path / "c", *options)
        assert answer.status == 2 and "meta.pt" in answer.err and "Nothing was written" in answer.err, answer.err
    assert contents(tmp_path / "c") == before


def test_another_meta_pt_is_not_replaced_and_the_same_one_stays(made, tmp_path):
    shutil.copytree(made / "lightning", tmp_path / "c")
    assert call("convert", made / "lightning", tmp_path / "c", "--overwrite").status == 0
    assert (tmp_path / "c" / "meta.pt").read_bytes() == (made / "lightning" / "meta.pt").read_bytes()
    torch.save({"epoch": 4}, tmp_path / "c" / "meta.pt")
    before = contents(tmp_path / "c")
    assert call("convert", made / "lightning", tmp_path / "c", "--overwrite").status == 2
    assert contents(tmp_path / "c") == before


def test_a_meta_pt_without_a_checkpoint_is_not_taken_over(made, tmp_path):
    (tmp_path / "c").mkdir()
    torch.save({"epoch": 4}, tmp_path / "c" / "meta.pt")
    before = contents(tmp_path / "c")
    for kind in ("ours", "lightning"):
        answer = call("convert", made / kind, tmp_path / "c")
        assert answer.status == 2 and "meta.pt" in answer.err
    assert contents(tmp_path / "c") == before


def test_a_step_of_torch_xla_s_manager_is_replaced_only_by_itself(made, tmp_path):
    shutil.copytree(made / "torch_xla", tmp_path / "c")
    (tmp_path / "c" / ".manager_metadata").write_bytes(b"step and time")
    before = contents(tmp_path / "c")
    answer = call("convert", made / "ours", tmp_path / "c", "--overwrite")
    assert answer.status == 2 and ".manager_metadata" in answer.err and contents(tmp_path / "c") == before
    assert call("convert", tmp_path / "c", tmp_path / "c", "--overwrite").status == 0
    assert call("diff", made / "torch_xla", tmp_path / "c").status == 0


KILLED = """
import os, signal, sys
real = os.replace
def replace(source, target, *rest, **options):
    if os.path.basename(target) == {name!r} and {when!r} == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target, *rest, **options)
    if os.path.basename(target) == {name!r}:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
from torch_xla_ckpt.cli import main
sys.argv = ["xc", "convert", *{arguments!r}]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["meta.pt", ".metadata"])
def test_a_killed_convert_commits_no_checkpoint_without_its_meta_pt(made, tmp_path, name, when):
    program = KILLED.format(name=name, when=when, arguments=[str(made / "lightning"), str(tmp_path / "c")])
    done = interpreters.run(["-c", program])
    assert done.returncode == -signal.SIGKILL
    if (name, when) == (".metadata", "after"):
        assert call("verify", tmp_path / "c").status == 0
    else:
        assert not (tmp_path / "c" / ".metadata").exists()
        assert call("convert", made / "lightning", tmp_path / "c").status == 0
    assert torch.load(tmp_path / "c" / "meta.pt") == {"epoch": 3}
    assert call("diff", made / "lightning", tmp_path / "c").status == 0
    (check,) = call("verify", tmp_path / "c", "--json").json["checks"]
    assert check["strangers"] == [] and not list((tmp_path / "c").glob("*.tmp"))


# Failures


def damage(folder):
    data = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


@pytest.mark.parametrize("kind", ["ours", "lightning"])
def test_a_convert_that_failed_leaves_no_folder(made, tmp_path, kind):
    shutil.copytree(made / kind, tmp_path / "bad")
    damage(tmp_path / "bad")
    assert call("convert", tmp_path / "bad", tmp_path / "c").status == 2
    assert folders(tmp_path) == ["bad"]
    (tmp_path / "mine").mkdir()
    assert call("convert", tmp_path / "bad", tmp_path / "mine").status == 2
    assert folders(tmp_path) == ["bad", "mine"] and not any((tmp_path / "mine").iterdir())

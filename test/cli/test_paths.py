"""What a PATH names: checkpoints, runs, named steps, golden files, and paths that are odd or lead nowhere."""

import os
import shutil

import pytest
import torch

from support import kinds
from support.command_line import call
from support.paths import TEST

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "step"),
    [("latest", 30), ("best:loss", 20), ("best:accuracy:max", 20), ("best:accuracy", 30), ("10", 10), ("latest/", 30)],
)
def test_a_run_s_steps_have_names(made, name, step):
    shown = call("ls", f"{made}/run/{name}", "--json").json
    assert shown["step"] == step and shown["path"].endswith(f"/{step}")


def test_best_asks_which_metric(made):
    refused = call("ls", made / "run" / "best")
    assert refused.status == 2 and "accuracy, loss" in refused.err and "best:" in refused.err
    assert call("ls", made / "run" / "best:perplexity").status == 2


def test_latest_skips_a_damaged_step(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    next((run / "30").glob("*.distcp")).unlink()
    assert call("ls", run / "latest", "--json").json["step"] == 20


def test_a_folder_named_latest_is_itself(tmp_path):
    kinds.save_ours(tmp_path / "latest", kinds.host_state(), step=5)
    assert call("ls", tmp_path / "latest", "--json").json["step"] == 5


@pytest.mark.parametrize("command", [("ls",), ("show", "KEY"), ("verify",), ("diff", "B")])
def test_nothing_at_the_path_is_one_line_and_status_2(tmp_path, command):
    verb, *rest = command
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other" / "things").mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").write_text("x")
    for name in ("absent", "empty", "file", "other", "absent/latest", "file/latest"):
        answer = call(verb, tmp_path / name, *(tmp_path / "b" if one == "B" else one for one in rest))
        if (verb, name) == ("verify", "file"):
            assert answer.status == 1  # a file that begins like no other format is a damaged safetensors file
            continue
        assert answer.status == 2 and answer.out == "", name
        assert len(answer.err.splitlines()) == 1 and answer.err.startswith("xc: "), answer.err


def test_a_run_where_a_checkpoint_is_needed_names_its_steps(made):
    answer = call("show", made / "run", "steps")
    assert answer.status == 2 and "10, 20, 30" in answer.err and "latest" in answer.err


@pytest.mark.parametrize("name", ["a b", "a*[b]?", "ü::x", "x#y%20", "~tilde", "a\nb"])
def test_odd_paths(tmp_path, name):
    kinds.save_ours(tmp_path / name, {"w": torch.ones(2)})
    answer = call("ls", tmp_path / name)
    assert answer.status == 0 and len(answer.lines) == 5
    assert call("verify", tmp_path / name).status == 0


GOLDEN = sorted(path for path in (TEST / "golden").glob("[!_]*") if path.is_dir())


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_golden_files_answer_every_question(golden, tmp_path):
    path = golden / "latest" if golden.name == "torch_xla-manager" else golden
    found = call("ls", path, "--json")
    assert found.status == 0, found.err
    for one in found.json["keys"]:
        assert call("show", path, one["key"]).status == 0
    assert call("verify", golden).status == 0
    assert call("explain", path, "--mesh", "a=2").status == 0
    assert call("convert", path, tmp_path / "c").status == 0
    assert call("diff", path, tmp_path / "c").status == 0
    assert call("report", golden, "-o", tmp_path / "r.html").status == 0


def test_links_and_read_only_folders(tmp_path):
    kinds.save_ours(tmp_path / "c", {"w": torch.ones(2)})
    (tmp_path / "link").symlink_to(tmp_path / "c")
    before = sorted(os.listdir(tmp_path / "c"))
    (tmp_path / "c").chmod(0o555)
    assert call("ls", tmp_path / "link").status == 0
    assert call("verify", tmp_path / "link").status == 0
    (tmp_path / "c").chmod(0o755)
    assert sorted(os.listdir(tmp_path / "c")) == before


@pytest.mark.parametrize("command", [("ls",), ("show", "w"), ("verify",), ("explain", "--mesh", "a=1"), ("report",)])
@pytest.mark.parametrize("name", ["pipe", "folder/.metadata", "model/model.safetensors"])
def test_a_pipe_is_refused_without_waiting_for_it(tmp_path, command, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    path = tmp_path / name.partition("/")[0]
    verb, *rest = command
    answer = call(verb, path, *rest, *(["-o", tmp_path / "r.html"] if verb == "report" else []))
    assert answer.status in (1, 2) and len(answer.err.splitlines()) <= 1 and "--debug" not in answer.err, answer.err


def test_home_slashes_links_and_relative_paths(tmp_path, monkeypatch):
    kinds.save_ours(tmp_path / "c", {"w": torch.ones(2)})
    (tmp_path / "link").symlink_to("c")
    kinds.save_safetensors_file(tmp_path / "m.safetensors")
    (tmp_path / "linked.safetensors").symlink_to("m.safetensors")
    monkeypatch.chdir(tmp_path)
    for path in ("c", "c/", "./c//", "c/../c", "link/", f"{tmp_path}/c/", f"file://{tmp_path}/c", "linked.safetensors"):
        assert call("ls", path).status == 0, path
    assert call("ls", "~/c", HOME=str(tmp_path)).status == 0
    monkeypatch.chdir(tmp_path / "c")
    assert call("ls", ".").status == 0 and call("verify", "../link").status == 0


def test_a_dead_link_and_a_link_to_itself_are_one_line(tmp_path):
    (tmp_path / "dead").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("dead", "loop"):
        answer = call("ls", tmp_path / name)
        assert answer.status == 2 and len(answer.err.splitlines()) == 1 and "--debug" not in answer.err, answer.err


@pytest.mark.parametrize("path", ["", "s3://", "nosuch://x/y", "a\0b"])
def test_a_path_that_is_none_is_one_line(path):
    answer = call("ls", path)
    assert answer.status == 2 and len(answer.err.splitlines()) <= 2 and "Traceback" not in answer.err
    assert "--debug" not in answer.err, answer.err


def test_a_run_of_torch_xla_s_manager(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(TEST / "golden" / "torch_xla-manager", run)
    found = call("ls", run, "--json").json
    assert [(one["step"], one["kind"]) for one in found["steps"]] == [(7, "committed")]
    assert call("ls", run / "latest", "--json").json["writer"] == "torch_xla"
    assert call("ls", run / "best").status == 2
    assert call("verify", run).status == 0

"""xc ls: keys, shapes, bytes and shardings of every kind of checkpoint, and the steps of a run."""

import shutil

import pytest
import torch

from support import kinds
from support.command_line import call

pytestmark = pytest.mark.filterwarnings("ignore")
every_kind = pytest.mark.parametrize("kind", kinds.CHECKPOINTS)


@every_kind
def test_ls_lists_every_key_with_shape_and_dtype(made, kind):
    found = call("ls", made / kind, "--json").json
    listed = {one["key"]: one for one in found["keys"]}
    assert set(kinds.keys_of(kind)) <= set(listed)
    weight = listed[kinds.keys_of(kind)[0]]
    assert (weight["dtype"], weight["shape"], weight["nbytes"]) == ("float32", [16, 8], 512)
    assert found["command"] == "ls" and found["version"] == 1


@every_kind
def test_ls_folds_layers_and_all_unfolds_them(made, kind):
    folded = kinds.keys_of(kind)[0].replace(".0.", ".{0..2}.")
    assert folded in call("ls", made / kind).out
    unfolded = call("ls", made / kind, "--all").out
    assert all(key in unfolded for key in kinds.keys_of(kind))


@every_kind
def test_ls_tree_adds_up(made, kind):
    lines = call("ls", made / kind, "--tree").lines
    (line,) = [line for line in lines if "layers.{0..2}" in line]
    assert line.split("  ")[-1] == "6 keys, 1.59 KiB"


def test_ls_tells_who_saved_what_and_when(tmp_path):
    path = tmp_path / "c"
    kinds.save_ours(path, kinds.host_state(), step=7, user_metadata={"note": "x"})
    found = call("ls", path, "--json").json
    assert (found["step"], found["user_metadata"], found["writer"]) == (7, {"note": "x"}, "torch_xla_ckpt")
    assert found["software"]["torch"] == torch.__version__
    assert "step 7" in call("ls", path).lines[2]


def test_ls_shows_the_saved_sharding(made):
    (line,) = [line for line in call("ls", made / "ours").lines if line.endswith("{0..2}.weight")]
    assert "4x2" in line


def test_ls_filters_by_globs_and_sorts(made):
    found = call("ls", made / "ours", "model.layers.*.bias", "steps", "--all", "--sort", "bytes").lines
    assert [line.split()[-1] for line in found[4:]] == ["steps", *(f"model.layers.{n}.bias" for n in range(3))]
    refused = call("ls", made / "ours", "modle.*")
    assert refused.status == 2 and "'modle.*'" in refused.err


def test_ls_of_a_run_shows_steps_metrics_and_sizes(made):
    found = call("ls", made / "run", "--json").json
    assert [one["step"] for one in found["steps"]] == [10, 20, 30]
    assert found["steps"][1]["saved"]["metrics"] == {"loss": 0.5, "accuracy": 1.0}
    assert all(one["nbytes"] > 0 and one["kind"] == "committed" and one["record"] for one in found["steps"])
    assert "loss 0.5" in call("ls", made / "run").out


def test_ls_of_a_run_shows_what_a_policy_keeps(made):
    found = call("ls", made / "run", "--keep", "best:1:loss").out
    assert "one of the best 1 by loss" in found and "would be deleted" in found


def test_ls_of_a_run_names_damaged_and_unfinished_steps(made, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    data = next((run / "20").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-64])
    (run / "30" / ".metadata").unlink()
    shutil.copytree(run / "30", run / "40")
    next((run / "40").glob("manifest-*")).unlink()
    steps = {one["step"]: one for one in call("ls", run, "--json").json["steps"]}
    assert steps[20]["kind"] == "damaged" and data.name in steps[20]["flaw"]
    assert steps[30]["kind"] == "damaged" and ".metadata is missing" in steps[30]["flaw"]
    assert steps[40]["kind"] == "unfinished" and steps[10]["kind"] == "committed"


def test_a_tree_has_levels_an_order_and_all_branches(made):
    whole = call("ls", made / "ours", "--tree", "--all").out
    assert all(f"  {n}  2 keys" in whole for n in range(3)) and "{0..2}" not in whole
    tops = [line.split()[0] for line in call("ls", made / "ours", "--depth", "1").lines[3:]]
    assert tops == ["model", "steps", "epoch", "config"]
    ordered = [line.split()[0] for line in call("ls", made / "ours", "--depth", "1", "--sort", "key").lines[3:]]
    assert ordered == sorted(tops)
    largest = [line.split()[0] for line in call("ls", made / "ours", "--depth", "1", "--sort", "bytes").lines[3:]]
    assert largest != tops and set(largest) == set(tops)


@pytest.mark.parametrize("option", [("--all",), ("--tree",), ("--depth", "2"), ("--sort", "key")])
def test_options_for_keys_are_refused_for_a_run(made, option):
    answer = call("ls", made / "run", *option)
    assert answer.status == 2 and option[0] in answer.err and "latest" in answer.err and not answer.out


def test_a_policy_is_refused_for_a_checkpoint(made):
    answer = call("ls", made / "ours", "--keep", "latest:1")
    assert answer.status == 2 and "retention policy" in answer.err

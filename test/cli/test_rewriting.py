"""xc convert and xc export: every value stays, and the target appears in one step."""

import shutil

import pytest
import torch

import torch_xla_ckpt as xc
from support import kinds
from support.command_line import call
from torch_xla_ckpt.testing import assert_same_state

pytestmark = pytest.mark.filterwarnings("ignore")
SPECS = ("--spec", "*.weight=fsdp,tensor", "--spec", "*.bias=fsdp")


def loaded(path):
    state = {}
    for key in ("model", "steps", "epoch", "config"):
        state[key] = {} if key in ("model", "config") else None
    xc.load(state, path)
    return state


@pytest.mark.parametrize("kind", ["ours", "stock", "torch_xla"])
def test_convert_keeps_every_value(made, tmp_path, kind):
    answer = call("convert", made / kind, tmp_path / "c", "--mesh", "fsdp=4,tensor=2", *SPECS, "--json")
    assert answer.status == 0, answer.err
    assert call("diff", made / kind, tmp_path / "c").status == 0
    assert call("verify", tmp_path / "c").status == 0
    listed = {one["key"]: one for one in call("ls", tmp_path / "c", "--json").json["keys"]}
    assert listed["model.layers.0.weight"]["chunks"] == 8 and listed["model.layers.0.bias"]["chunks"] == 4
    assert_same_state(loaded(tmp_path / "c"), loaded(made / kind))


def test_convert_keeps_step_metadata_and_paths(tmp_path):
    state = {"model": [{"w": torch.ones(4, requires_grad=True)}, {7: torch.ones(2)}], "odd.key": 5, "empty": {}}
    kinds.save_ours(tmp_path / "a", state, step=9, user_metadata={"note": [1]})
    assert call("convert", tmp_path / "a", tmp_path / "b").status == 0
    found = call("ls", tmp_path / "b", "--json").json
    assert (found["step"], found["user_metadata"]) == (9, {"note": [1]})
    one, other = (xc.ShardReader(tmp_path / name).read_metadata() for name in "ab")
    assert one.planner_data == other.planner_data
    assert one.state_dict_metadata == other.state_dict_metadata


def test_convert_in_place_and_over_another(made, tmp_path):
    shutil.copytree(made / "ours", tmp_path / "c")
    refused = call("convert", tmp_path / "c", tmp_path / "c")
    assert refused.status == 2 and "--overwrite" in refused.err
    assert call("convert", tmp_path / "c", tmp_path / "c", "--overwrite").status == 0
    assert call("diff", made / "ours", tmp_path / "c").status == 0
    listed = call("ls", tmp_path / "c", "--json").json["keys"]
    assert all(one["chunks"] == 1 for one in listed)


def test_convert_dry_run_writes_nothing(made, tmp_path):
    answer = call("convert", made / "ours", tmp_path / "c", "--dry-run")
    assert answer.status == 0 and "would rewrite" in answer.out and not (tmp_path / "c").exists()


def test_convert_of_a_damaged_checkpoint_leaves_nothing_and_the_old_one(made, tmp_path):
    shutil.copytree(made / "ours", tmp_path / "bad")
    data = max((tmp_path / "bad").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    kinds.save_ours(tmp_path / "old", kinds.host_state(), step=1)
    answer = call("convert", tmp_path / "bad", tmp_path / "old", "--overwrite")
    assert answer.status == 2 and data.name in answer.err
    assert call("verify", tmp_path / "old").status == 0
    assert call("ls", tmp_path / "old", "--json").json["step"] == 1


def test_convert_into_a_run_is_refused(made):
    assert call("convert", made / "ours", made / "run").status == 2


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_export_writes_what_others_read(made, tmp_path, form):
    target = tmp_path / ("model.pt" if form == "torch" else "model")
    answer = call("export", made / "run" / "latest", target, "--to", form, "--key", "model", "--dtype", "bfloat16")
    assert answer.status == 0, answer.err
    shown = call("show", target, "layers.1.bias", "--json").json
    assert (shown["dtype"], shown["values"]) == ("bfloat16", [30.0] * 8)
    assert call("convert", made / "run" / "latest", tmp_path / "again", "--to", form).status in (0, 2)
    refused = call("export", made / "ours", tmp_path / "x", "--dtype", "float31")
    assert refused.status == 2


@pytest.mark.parametrize("kind", kinds.CHECKPOINTS)
def test_convert_reads_every_kind(made, tmp_path, kind):
    answer = call("convert", made / kind, tmp_path / "c", "--json")
    assert answer.status == 0, answer.err
    assert call("diff", made / kind, tmp_path / "c").status == 0
    assert (tmp_path / "c" / "meta.pt").exists() == (kind == "lightning")
    state = {"model": {}, "state_dict": {}}
    xc.load(state, tmp_path / "c", missing="keep")


def snapshot(folder):
    return {path: (path.read_bytes() if path.is_file() else None) for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("kind", kinds.CHECKPOINTS)
def test_dry_runs_write_nothing_anywhere(made, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    before = snapshot(made), snapshot(tmp_path)
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    assert call("convert", made / kind, "c", "--dry-run", "--json", **home).json["is_dry"] is True
    assert call("export", made / kind, "e", "--to", "dcp", "--dry-run", **home).status == 0
    if not kind.startswith("lightning-"):
        answer = call("export", made / kind, "e", "--key", "", "--dry-run", "--json", **home)
        assert answer.status == 0 and answer.json["is_dry"] is True, answer.err
        assert call("convert", made / kind, "e.pt", "--to", "torch", "--dry-run", **home).status in (0, 2)
    assert call("prune", made / "run", "--keep", "latest:1", "--dry-run", **home).status == 0
    assert (snapshot(made), snapshot(tmp_path)) == before


def test_a_dry_run_is_refused_where_the_run_would_be(made):
    for options in ((), ("--dry-run",)):
        refused = call("convert", made / "ours", made / "stock", *options)
        assert refused.status == 2 and "--overwrite" in refused.err
    assert call("convert", made / "ours", made / "stock", "--dry-run", "--overwrite").status == 0


@pytest.mark.parametrize("target", ["run", "torch", "safetensors", "safetensors-file"])
def test_convert_overwrites_nothing_but_a_checkpoint_of_dcp(made, target):
    before = snapshot(made)
    for options in ((), ("--overwrite",), ("--overwrite", "--dry-run")):
        answer = call("convert", made / "ours", made / target, *options)
        assert answer.status == 2 and len(answer.err.splitlines()) == 1 and "--debug" not in answer.err, answer.err
    assert snapshot(made) == before


def test_convert_in_place_keeps_what_lightning_saved(made, tmp_path):
    shutil.copytree(made / "lightning", tmp_path / "c")
    assert call("convert", tmp_path / "c", tmp_path / "c", "--overwrite").status == 0
    assert torch.load(tmp_path / "c" / "meta.pt") == {"epoch": 3}
    assert call("diff", made / "lightning", tmp_path / "c").status == 0
    assert not list((tmp_path / "c").glob("__0_0.distcp"))


@pytest.mark.parametrize("kind", ["ours", "stock", "torch_xla", "lightning", "torch"])
def test_export_of_every_kind(made, tmp_path, kind):
    key = "state_dict" if kind == "lightning" else "model"
    answer = call("export", made / kind, tmp_path / "hf", "--key", key, "--json")
    assert answer.status == 0, answer.err
    assert call("show", tmp_path / "hf", "layers.2.bias", "--json").json["values"] == [2.0] * 8
    again = call("export", made / kind, tmp_path / "hf", "--key", key)
    assert again.status == 2 and "already has" in again.err


def test_options_of_other_formats_are_refused(made, tmp_path):
    for options in (("--to", "torch", "--mesh", "a=2"), ("--to", "safetensors", "--overwrite"), ("--spec", "*=a")):
        assert call("convert", made / "ours", tmp_path / "c", *options).status == 2
    assert call("export", made / "ours", tmp_path / "c", "--to", "dcp", "--dtype", "bfloat16").status == 2
    assert not any(tmp_path.iterdir())

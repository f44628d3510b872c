"""Checkpoints that earlier versions and other programs wrote open, with every value, on the host and on a mesh."""

import importlib.util
import shutil

import pytest
import torch

import torch_xla_ckpt as xc
from support.meshes import holds, mesh, put, same_bits
from support.paths import TEST

GOLDEN = TEST / "golden"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name != "__pycache__")

spec = importlib.util.spec_from_file_location("golden_write", GOLDEN / "write.py")
write = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write)


def path_of(name):
    return GOLDEN / name / "7" if name == "torch_xla-manager" else GOLDEN / name


def test_there_is_a_folder_for_each_kind_and_each_has_a_line_in_the_readme():
    listed = [line.split("`")[1] for line in (GOLDEN / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert sorted(listed) == FOLDERS and len(FOLDERS) == 11


def test_golden_files_are_less_than_one_mebibyte_together():
    assert sum(file.stat().st_size for file in GOLDEN.rglob("*") if file.is_file()) < 1 << 20


@pytest.mark.parametrize("name", FOLDERS)
def test_every_value_is_read_on_the_host(name):
    state = {"model": {}, "step": 0, "name": "", "optim": {}}
    xc.load(state, path_of(name))
    assert state["model"].keys() == write.values().keys()
    assert all(same_bits(state["model"][key].detach(), value) for key, value in write.values().items())
    expected = write.rest()
    assert (state["step"], state["name"]) == (7, "golden")
    moments = next(iter(state["optim"]["state"].values()))
    assert torch.equal(moments["exp_avg"], expected["optim"]["state"][0]["exp_avg"]) and float(moments["step"]) == 3.0
    assert [group["lr"] for group in state["optim"]["param_groups"]] == [0.1]


@pytest.mark.parametrize("name", FOLDERS)
def test_model_is_read_onto_another_mesh(name):
    on = mesh((2, 4))
    target = {
        key: put(torch.zeros_like(value), on, ("a", "b") if value.ndim == 2 else None)
        for key, value in write.values().items()
    }
    xc.load({"model": target}, path_of(name), only="model.*")
    assert all(holds(target[key], value) for key, value in write.values().items())


@pytest.mark.parametrize("name", FOLDERS)
def test_verify_finds_no_damage(name):
    report = xc.verify(path_of(name))
    assert report and report.files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours-first-writer", "ours-hardened", "ours-recut"])
def test_every_flipped_bit_of_our_metadata_is_found(name, tmp_path):
    """Each form of the last line of .metadata protects all that lies before it."""
    shutil.copytree(path_of(name), tmp_path / name)
    file = tmp_path / name / ".metadata"
    whole = file.read_bytes()
    for position in (*range(0, len(whole) - 100, 97), *range(len(whole) - 100, len(whole))):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert not xc.verify(tmp_path / name), position


@pytest.mark.parametrize("name", FOLDERS)
def test_model_is_exported(name, tmp_path):
    xc.export(path_of(name), tmp_path / "model", key="model")
    state = {"model": {}}
    xc.load(state, tmp_path / "model")
    assert all(same_bits(state["model"][key], value) for key, value in write.values().items())

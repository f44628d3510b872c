"""An export never damages its own source, another checkpoint or a run."""

import os

import pytest
import torch

import torch_xla_ckpt as xc
from support.exported import written

STATE = {"model": {"w": torch.ones(3)}, "step": 1}


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path):
    with xc.CheckpointManager(tmp_path / "run") as manager:
        for step in (100, 200):
            manager.save(step, STATE, force=True)
    return tmp_path / "run"


def test_file_of_the_source_is_not_replaced(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    before = content(run)
    data = next(name.name for name in (run / "100").glob("*.distcp"))
    for name in (".metadata", data, "new.pt", "deep/new.pt"):
        for folder in (run, tmp_path / "link"):
            with pytest.raises(xc.CheckpointError, match=r"lies inside of the source .*Nothing was written"):
                xc.export(run / "100", folder / "100" / name, format="torch")
            with pytest.raises(xc.CheckpointError, match="lies inside of the source"):
                xc.export(run / "100", folder / "100" / name, format="torch", dry_run=True)
    assert content(run) == before and xc.verify(run / "100")


def test_file_inside_of_another_checkpoint_is_not_replaced(run):
    before = content(run)
    for source in (STATE, run / "100"):
        with pytest.raises(xc.CheckpointError, match="a file inside of the checkpoint"):
            xc.export(source, run / "200" / ".metadata", format="torch")
    assert content(run) == before


def test_folder_of_a_run_gets_no_model(run):
    before = content(run)
    for source in (STATE, run / "100"):
        for name in ("", "model.safetensors"):
            with pytest.raises(xc.CheckpointError, match="is the folder of a run and holds the steps 100, 200"):
                xc.export(source, run / name)
    assert content(run) == before
    xc.export(run / "100", run / "model.pt", format="torch")
    xc.export(run / "100", run / "hf")


def test_single_file_is_not_exported_over_itself(tmp_path, monkeypatch):
    xc.export(STATE, tmp_path / "a.safetensors")
    monkeypatch.chdir(tmp_path)
    for target in (tmp_path / "a.safetensors", "./a.safetensors"):
        with pytest.raises(xc.CheckpointError, match="would replace its own source"):
            xc.export(tmp_path / "a.safetensors", target, dtype=torch.bfloat16)
    assert written(tmp_path / "a.safetensors")["w"].dtype == torch.float32
    xc.export("a.safetensors", "b.safetensors")
    os.symlink("a.safetensors", "latest.safetensors")
    xc.export("a.safetensors", "latest.safetensors")  # replaces the link, and its target stays
    assert not (tmp_path / "latest.safetensors").is_symlink() and (tmp_path / "a.safetensors").is_file()


def test_source_in_a_store_is_not_replaced():
    xc.save(STATE, "memory://exported/run/100")
    for target, match in (
        ("memory://exported/run/100/.metadata", "lies inside of the source"),
        ("memory://exported/run/100/hf", "lies inside of the source"),
        ("memory://exported/run", "is the folder of a run"),
    ):
        with pytest.raises(xc.CheckpointError, match=match):
            xc.export("memory://exported/run/100", target, format="torch" if "metadata" in target else "safetensors")
    assert xc.verify("memory://exported/run/100")

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
    before = (tmp_path / "a.safetensors").read_bytes()
    for dry_run in (True, False):
        with pytest.raises(xc.CheckpointError, match="would replace its own source"):
            xc.export("a.safetensors", "latest.safetensors", dtype=torch.bfloat16, dry_run=dry_run)
    assert (tmp_path / "latest.safetensors").is_symlink() and (tmp_path / "a.safetensors").read_bytes() == before


@pytest.mark.parametrize("name, format", [("model.safetensors", "safetensors"), ("model.pt", "torch")])
@pytest.mark.parametrize("is_there", [True, False], ids=["to a file", "to a file that is not there yet"])
def test_link_to_a_file_stays_and_its_file_is_replaced(tmp_path, name, format, is_there):
    disk, links = tmp_path / "disk", tmp_path / "links"
    disk.mkdir(), links.mkdir()
    if is_there:
        (disk / "real").write_bytes(b"old")
        os.link(disk / "real", disk / "kept")  # another name of the old bytes, which a rename leaves alone
    (disk / "inner").symlink_to("real")
    (links / name).symlink_to("../disk/inner")
    xc.save(STATE, tmp_path / "c")
    for value, source in ((1.0, tmp_path / "c"), (2.0, {"model": {"w": torch.full((3,), 2.0)}})):
        report = xc.export(source, links / name, format=format)
        assert os.readlink(links / name) == "../disk/inner" and os.readlink(disk / "inner") == "real"
        assert not (disk / "real").is_symlink() and report.path == str(links / name)
        loaded = {"w": torch.zeros(3)}
        xc.load(loaded, links / name)
        assert loaded["w"].eq(value).all()
    assert os.listdir(links) == [name]
    assert sorted(os.listdir(disk)) == sorted(["inner", "real", *(["kept"] if is_there else [])])
    assert not is_there or (disk / "kept").read_bytes() == b"old"


def test_links_that_lead_nowhere_or_into_a_checkpoint_are_errors_before_anything_is_written(run, tmp_path):
    before = content(run)
    (tmp_path / "folder").mkdir()
    for name, to, match in (
        ("gone.pt", "no/folder/file.pt", "whose folder does not exist"),
        ("loop.pt", "loop.pt", "leads to itself"),
        ("source.pt", run / "100" / ".metadata", "lies inside of the source"),
        ("other.pt", run / "200" / "new.pt", "a file inside of the checkpoint"),
        ("model.safetensors", run / "model.safetensors", "is the folder of a run"),
        ("folder.pt", tmp_path / "folder", "is a folder, and the export writes one file"),
    ):
        (tmp_path / name).symlink_to(to)
        for dry_run in (True, False):
            with pytest.raises(xc.CheckpointError, match=match):
                form = "safetensors" if name.endswith("safetensors") else "torch"
                xc.export(run / "100", tmp_path / name, format=form, dry_run=dry_run)
        assert (tmp_path / name).is_symlink()
    assert content(run) == before and os.listdir(tmp_path / "folder") == []


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

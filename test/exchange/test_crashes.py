"""Killed, failed and concurrent exports: nothing looks like a model until it is whole, and the next one works."""

import os
import shutil
import signal
import threading

import pytest

import torch_xla_ckpt as xc
from support import exported, killed_export
from support.exported import assert_nothing_left, assert_same, live, written
from support.programs import Program


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "checkpoint"
    xc.save(exported.state(), path)
    return path


SHARDS = {"max_shard_bytes": 300_000}


def killed(tmp_path, checkpoint, folder, nth):
    """Run a program that is killed before its operation ``nth``; return what it printed."""
    output = tmp_path / "output.txt"
    status = Program(killed_export.run, (str(checkpoint), str(folder), nth, SHARDS), output).wait(100)
    assert status == (-signal.SIGKILL if nth else 0), output.read_text()
    return output.read_text()


def new_folder(tmp_path, name, existing):
    folder = tmp_path / name / "model"
    folder.parent.mkdir()
    if existing:
        folder.mkdir()
        (folder / "README.md").write_text("mine")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("existing", [False, True], ids=["new folder", "existing folder"])
def test_export_killed_at_any_operation_leaves_no_half_model_and_the_next_one_works(tmp_path, checkpoint, existing):
    total = int(killed(tmp_path, checkpoint, new_folder(tmp_path, "whole", existing), 0).split()[-1])
    assert total > 20
    completed = []
    for nth in range(1, total + 1):
        folder = new_folder(tmp_path, str(nth), existing)
        killed(tmp_path, checkpoint, folder, nth)
        if (folder / "model.safetensors.index.json").exists():
            completed.append(nth)
        else:
            if (
                len(list(folder.glob("*.safetensors"))) < 3
            ):  # else all weights are there, and only their index is missing
                with pytest.raises(xc.CheckpointError):
                    xc.load({"model": {}}, folder)
            xc.export(checkpoint, folder, **SHARDS)
        assert_same(written(folder))
        assert not existing or (folder / "README.md").read_text() == "mine"
        if nth not in completed:
            assert not [name for name in (*os.listdir(folder), *os.listdir(folder.parent)) if name.endswith(".part")]
    # Only the operations after the commit find the model complete.
    assert completed == list(range(total - len(completed) + 1, total + 1)) and len(completed) < total / 2


@pytest.mark.slow
def test_export_through_a_link_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path, checkpoint):
    old = b"old"

    def linked(name):
        folder = tmp_path / name
        (folder / "disk").mkdir(parents=True)
        (folder / "disk" / "real").write_bytes(old)
        (folder / "model.safetensors").symlink_to("disk/real")
        return folder

    total = int(killed(tmp_path, checkpoint, linked("whole") / "model.safetensors", 0).split()[-1])
    replaced = []
    for nth in range(1, total + 1):
        folder = linked(str(nth))
        killed(tmp_path, checkpoint, folder / "model.safetensors", nth)
        if (folder / "disk" / "real").read_bytes() == old:
            xc.export(checkpoint, folder / "model.safetensors")
            assert os.listdir(folder / "disk") == ["real"]  # the part folder of the killed export is gone
        else:
            replaced.append(nth)
        assert os.readlink(folder / "model.safetensors") == "disk/real"
        assert_same(exported.load_file(folder / "disk" / "real"))
    assert replaced == list(range(total - len(replaced) + 1, total + 1)) and 0 < len(replaced) < total / 2


def test_killed_move_into_an_existing_folder_is_undone_by_the_next_export(tmp_path, checkpoint, monkeypatch):
    """Files that a killed export had moved are known by their part folder. Files of others stay."""
    folder = new_folder(tmp_path, "killed", True)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    real, calls = os.link, []

    def stopped(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(os, "link", stopped)
    monkeypatch.setattr(os, "unlink", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        xc.export(checkpoint, folder, **SHARDS)
    monkeypatch.undo()
    assert len(list(folder.glob("*.safetensors"))) == 2
    xc.export(checkpoint, folder, **SHARDS)
    assert_same(written(folder))
    assert sorted(os.listdir(folder))[0] == "README.md"


def test_failed_export_removes_what_it_wrote(tmp_path, checkpoint, monkeypatch):
    real, calls = os.pwrite, []

    def full(*args):
        calls.append(args)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    for source in (checkpoint, {"model": live()}):
        calls.clear()
        with pytest.raises((OSError, xc.CheckpointError), match="No space left"):
            xc.export(source, tmp_path / "model")
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("existing", [False, True], ids=["new folder", "existing folder"])
def test_two_programs_at_once_leave_one_whole_model(tmp_path, checkpoint, existing):
    folder = tmp_path / "model"
    if existing:
        folder.mkdir()
    results = []

    def work():
        try:
            results.append(xc.export(checkpoint, folder, max_shard_bytes=300_000))
        except xc.CheckpointError as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(isinstance(one, xc.ExportReport) for one in results), results
    assert_same(written(folder))
    assert_nothing_left(tmp_path)


def test_read_only_folder_is_an_error_that_leaves_nothing(tmp_path, checkpoint):
    if os.geteuid() == 0:
        (tmp_path / "file").touch()
        with pytest.raises((OSError, xc.CheckpointError)):
            xc.export(checkpoint, tmp_path / "file" / "model")
        return
    tmp_path.chmod(0o500)
    with pytest.raises(OSError):
        xc.export(checkpoint, tmp_path / "model")


def test_link_to_nothing_is_an_error_before_anything_is_written(tmp_path, checkpoint):
    (tmp_path / "model").symlink_to(tmp_path / "gone")
    with pytest.raises(xc.CheckpointError, match=r"is a link to .*gone, which does not exist\. Nothing"):
        xc.export(checkpoint, tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]


def test_link_to_a_folder_is_followed(tmp_path, checkpoint):
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk")
    xc.export(checkpoint, tmp_path / "model")
    assert_same(written(tmp_path / "disk"))
    assert (tmp_path / "model").is_symlink() and os.listdir(tmp_path / "disk") == ["model.safetensors"]


def test_full_disk_names_the_file(tmp_path, checkpoint, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*model\.safetensors'"):
        xc.export(checkpoint, tmp_path / "model")

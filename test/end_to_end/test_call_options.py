"""The path and the storage options of a call, alone and beside a storage writer or reader."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support.s3 import Server

pytestmark = pytest.mark.filterwarnings("ignore")


def saving(call):
    """A function with the arguments of ``xc.save`` that returns after the commit."""
    if call == "save":
        return xc.save
    return lambda *arguments, **options: xc.async_save(*arguments, **options).result(60)


@pytest.fixture(params=["save", "async_save"])
def save(request):
    return saving(request.param)


def loaded(path, **options):
    state = {"n": None}
    xc.load(state, path, **options)
    return state["n"]


@pytest.mark.slow
def test_storage_options_reach_the_store_of_every_call():
    with Server() as server, server.bucket("options") as bucket:
        for number, call in enumerate(("save", "async_save")):
            url = f"s3://{bucket.name}/{call}"
            saving(call)({"n": number}, url, storage_options=server.options)
            assert loaded(url, storage_options=server.options) == number


def test_storage_options_beside_a_storage_writer_or_reader_are_refused(tmp_path, save):
    xc.save({"n": 1}, tmp_path)
    with pytest.raises(ValueError, match=r"beside storage_writer=.* Pass them to the storage writer"):
        save({"n": 2}, storage_writer=xc.ShardWriter(tmp_path), storage_options={"key": "k"})
    with pytest.raises(ValueError, match=r"beside storage_reader=.* Pass them to the storage reader"):
        loaded(tmp_path, storage_reader=xc.ShardReader(tmp_path), storage_options={"key": "k"})
    assert loaded(tmp_path) == 1


@pytest.mark.parametrize("kind", [xc.ShardWriter, dcp.FileSystemWriter])
def test_a_path_beside_a_writer_of_another_path_is_refused_and_nothing_is_saved(tmp_path, save, kind):
    writer = kind(tmp_path / "writer's")
    with pytest.raises(ValueError) as error:
        save({"n": 1}, tmp_path / "call's", storage_writer=writer)
    assert str(tmp_path / "call's") in str(error.value) and str(tmp_path / "writer's") in str(error.value)
    assert not list(tmp_path.iterdir())
    save({"n": 1}, storage_writer=writer)
    assert loaded(tmp_path / "writer's") == 1  # the refused call did not change the writer's path


@pytest.mark.parametrize("kind", [xc.ShardReader, dcp.FileSystemReader])
def test_a_path_beside_a_reader_of_another_path_is_refused(tmp_path, kind):
    for n in (1, 2):
        xc.save({"n": n}, tmp_path / str(n))
    reader = kind(tmp_path / "1")
    with pytest.raises(ValueError) as error:
        loaded(tmp_path / "2", storage_reader=reader)
    assert str(tmp_path / "1") in str(error.value) and str(tmp_path / "2") in str(error.value)
    assert loaded(None, storage_reader=reader) == 1


@pytest.mark.parametrize("kind", [xc.ShardWriter, dcp.FileSystemWriter])
def test_the_same_path_in_other_words_beside_a_writer_is_accepted(tmp_path, monkeypatch, save, kind):
    monkeypatch.chdir(tmp_path)
    for n, path in enumerate(("c", tmp_path / "c", f"{tmp_path}/c/")):
        save(
            {"n": n},
            path,
            storage_writer=kind(tmp_path / "c", **({"overwrite": True} if kind is not xc.ShardWriter else {})),
        )
        assert loaded(path, storage_reader=xc.ShardReader("c")) == n


def test_a_writer_or_reader_without_a_path_gets_the_path_of_the_call(tmp_path, save):
    writer, reader = dcp.FileSystemWriter(tmp_path / "unused"), dcp.FileSystemReader(tmp_path / "unused")
    writer.path = reader.path = None
    save({"t": torch.ones(3), "n": 1}, tmp_path / "c", storage_writer=writer)
    assert loaded(tmp_path / "c", storage_reader=reader) == 1


def test_a_call_without_any_path_is_refused(save):
    with pytest.raises(ValueError, match="there is no path to the checkpoint"):
        save({"n": 1})
    with pytest.raises(ValueError, match="there is no path to the checkpoint"):
        xc.load({"n": 1})

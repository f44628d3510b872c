"""Exports to stores that fsspec reaches: whole files, in the right order, and older files survive failures."""

import pytest
import torch

import torch_xla_ckpt as xc
from support import exported
from support.exported import assert_same, live
from support.s3 import Server, asks, refused


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "checkpoint"
    xc.save(exported.state(), path)
    return path


@pytest.fixture(params=["checkpoint", "live"])
def source(request):
    return {"model": live(), "step": 100} if request.param == "live" else request.getfixturevalue("checkpoint")


def test_store_behind_fsspec_gets_whole_files(tmp_path, source, request):
    root = f"memory://{id(request)}"
    xc.export(source, f"{root}/model", max_shard_bytes=300_000)
    xc.export(source, f"{root}/file.safetensors", memory_budget=1)
    xc.export(source, f"{root}/file.pt", format="torch")
    for path in ("model", "file.safetensors", "file.pt"):
        state = {"model": {}}
        xc.load(state, f"{root}/{path}")
        assert_same(state["model"])
    with pytest.raises(xc.CheckpointError, match="already has"):
        xc.export(source, f"{root}/model")


@pytest.mark.slow
def test_object_store_gets_a_model_and_gives_it_back(tmp_path, source):
    with Server() as s3, s3.bucket("models"):
        options = s3.options
        report = xc.export(source, "s3://models/m", max_shard_bytes=300_000, storage_options=options)
        state = {"model": {}}
        loaded = xc.load(state, "s3://models/m", storage_options=options)
        assert_same(state["model"])
        assert len(report.files) == 3 and loaded.bytes_read <= 1.05 * loaded.bytes_needed
        assert xc.verify("s3://models/m", storage_options=options)
        xc.export("s3://models/m", "s3://models/one.safetensors", storage_options=options)
        xc.export("s3://models/m", "s3://models/one.pt", format="torch", storage_options=options)
        for path in ("one.safetensors", "one.pt"):
            state = {"model": {}}
            xc.load(state, f"s3://models/{path}", storage_options=options)
            assert_same(state["model"])


@pytest.mark.slow
def test_failed_export_leaves_an_older_file_of_a_store_alone(source):
    with Server() as s3, s3.bucket("older"):
        old = {"w": torch.ones(3)}
        for name, options in (("m.safetensors", {}), ("m.pt", {"format": "torch"})):
            path = f"s3://older/{name}"
            xc.export(old, path, storage_options=s3.options, **options)
            with s3.failing(refused, asks("PutObject")), pytest.raises((OSError, xc.CheckpointError)):
                xc.export(source, path, storage_options=s3.options, **options)
            state = {"model": {}}
            xc.load(state, path, storage_options=s3.options)
            assert_same(state["model"], old)


def test_failed_export_removes_its_files_from_a_store(source):
    with Server() as s3, s3.bucket("failed") as bucket:
        with s3.failing(refused, asks("PutObject", "*00003*")), pytest.raises((OSError, xc.CheckpointError)):
            xc.export(source, "s3://failed/model", max_shard_bytes=300_000, storage_options=s3.options)
        assert bucket.objects() == []


@pytest.mark.slow
def test_file_that_makes_a_folder_a_model_comes_last(tmp_path, source):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    for most, last in ((5 << 30, "model.safetensors"), (300_000, "model.safetensors.index.json")):
        with Server() as s3, s3.bucket("order"):
            with s3.recorded() as log:
                options = {"config_from": tmp_path, "max_shard_bytes": most, "storage_options": s3.options}
                report = xc.export(source, "s3://order/model", **options)
            puts = [request.name for request in log if request.operation == "PutObject"]
            assert puts[:2] == ["config.json", "tokenizer.json"] and puts[-1] == last
            assert set(puts[2:]) == {*report.files, last}


def test_configuration_is_read_from_a_store_with_the_same_options(tmp_path):
    with Server() as s3, s3.bucket("base"):
        s3.client.put_object(Bucket="base", Key="config.json", Body=b"{}")
        options = {"config_from": "s3://base", "storage_options": s3.options}
        report = xc.export({"w": torch.ones(2)}, tmp_path / "model", **options)
    assert report.copied == ("config.json",)

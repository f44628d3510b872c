"""Exports to stores that fsspec reaches: whole files, in the right order, and older files survive failures."""

import itertools
import json

import pytest
import torch

import torch_xla_ckpt as xc
from support import exported, killed_export
from support.exported import assert_same, live
from support.programs import Program
from support.s3 import Hold, Server, asks, refused
from torch_xla_ckpt.exchange.claim import CLAIM
from torch_xla_ckpt.storage import Holder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "checkpoint"
    xc.save(exported.state(), path)
    return path


@pytest.fixture(scope="module")
def s3():
    with Server() as server:
        yield server


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
def test_object_store_gets_a_model_and_gives_it_back(s3, tmp_path, source):
    with s3.bucket("models"):
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
def test_failed_export_leaves_an_older_file_of_a_store_alone(s3, source):
    with s3.bucket("older"):
        old = {"w": torch.ones(3)}
        for name, options in (("m.safetensors", {}), ("m.pt", {"format": "torch"})):
            path = f"s3://older/{name}"
            xc.export(old, path, storage_options=s3.options, **options)
            with s3.failing(refused, asks("PutObject")), pytest.raises((OSError, xc.CheckpointError)):
                xc.export(source, path, storage_options=s3.options, **options)
            state = {"model": {}}
            xc.load(state, path, storage_options=s3.options)
            assert_same(state["model"], old)


def test_failed_export_removes_its_files_from_a_store(s3, source):
    with s3.bucket("failed") as bucket:
        with s3.failing(refused, asks("PutObject", "*00003*")), pytest.raises((OSError, xc.CheckpointError)):
            xc.export(source, "s3://failed/model", max_shard_bytes=300_000, storage_options=s3.options)
        assert bucket.objects() == []


@pytest.mark.slow
def test_file_that_makes_a_folder_a_model_comes_last(s3, tmp_path, source):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    for most, last in ((5 << 30, "model.safetensors"), (300_000, "model.safetensors.index.json")):
        with s3.bucket("order"):
            with s3.recorded() as log:
                options = {"config_from": tmp_path, "max_shard_bytes": most, "storage_options": s3.options}
                report = xc.export(source, "s3://order/model", **options)
            puts = [request.name for request in log if request.operation == "PutObject" and request.name != CLAIM]
            assert puts[:2] == ["config.json", "tokenizer.json"] and puts[-1] == last
            assert set(puts[2:]) == {*report.files, last}


def test_configuration_is_read_from_a_store_with_the_same_options(s3, tmp_path):
    with s3.bucket("base"):
        s3.client.put_object(Bucket="base", Key="config.json", Body=b"{}")
        options = {"config_from": "s3://base", "storage_options": s3.options}
        report = xc.export({"w": torch.ones(2)}, tmp_path / "model", **options)
    assert report.copied == ("config.json",)


@pytest.mark.slow
def test_second_export_is_refused_while_the_first_runs_and_cleans_up_after_it_was_killed(s3, tmp_path, checkpoint):
    with s3.bucket("claimed") as bucket:
        options = {"max_shard_bytes": 300_000, "storage_options": s3.options}
        hold, weights, numbers = Hold(), asks("PutObject", "*.safetensors"), itertools.count(1)
        with s3.failing(hold, lambda request: weights(request) and next(numbers) == 2):
            arguments = (str(checkpoint), "s3://claimed/model", 0, options)
            first = Program(killed_export.run, arguments, tmp_path / "output.txt")
            assert hold.here.wait(60), (tmp_path / "output.txt").read_text()
            with pytest.raises(xc.ConcurrentSaveError, match=rf"another export is writing to .*process {first.pid} on"):
                xc.export(checkpoint, "s3://claimed/model", **options)
            assert len(bucket.objects()) == 2  # the claim and one file
            first.kill()
            first.wait(60)
            hold.free.set()
        xc.export({"model": {"w": torch.ones(3)}}, "s3://claimed/model", storage_options=s3.options)
        assert bucket.objects() == ["model/model.safetensors"]


def test_export_that_lost_its_claim_leaves_the_files_of_the_other_and_no_index(s3, source):
    with s3.bucket("lost") as bucket:

        def removed(request, forward):
            del bucket[f"model/{CLAIM}"]
            return forward()

        with (
            s3.failing(removed, asks("PutObject", "*00003*"), times=1),
            pytest.raises(xc.ConcurrentSaveError, match="no longer that of this export"),
        ):
            xc.export(source, "s3://lost/model", max_shard_bytes=300_000, storage_options=s3.options)
        assert bucket.objects() == [f"model/model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


@pytest.mark.parametrize("claim", ["dead", "elsewhere", "hostile", "damaged"])
def test_claim_that_was_left_behind_never_removes_a_whole_model(s3, source, claim):
    with s3.bucket("left") as bucket:
        report = xc.export(source, "s3://left/model", max_shard_bytes=300_000, storage_options=s3.options)
        before = bucket.objects()
        here = Holder.here()
        holder = {**vars(here), "pid": 2**30, "started": "1"} | ({"boot": "another"} if claim == "elsewhere" else {})
        fields = {"id": "1", "holder": holder, "files": list(report.files), "last": "model.safetensors.index.json"}
        if claim == "hostile":
            fields |= {"files": ["../x", ["model"], 5, *report.files], "last": {"a": 1}, "holder": {"pid": []}}
        bucket[f"model/{CLAIM}"] = b"[" if claim == "damaged" else json.dumps(fields).encode()
        with pytest.raises(xc.CheckpointError) as error:
            xc.export(source, "s3://left/model", storage_options=s3.options)
        if claim == "dead":
            assert "already has model-00001" in str(error.value) and bucket.objects() == before
        else:
            assert f"remove {CLAIM}" in str(error.value) and bucket.objects() == [f"model/{CLAIM}", *before]
            assert claim == "damaged" or "model-00003" in str(error.value)

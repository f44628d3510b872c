"""Exports by several processes: each writes what it holds, or its share of a checkpoint, and nothing twice."""

import json
import os
import pathlib

import pytest
import torch
from safetensors.torch import load_file

import torch_xla_ckpt as xc
from support import hosts, hugging_face, rank_processes
from support.meshes import mesh, same_bits
from support.s3 import Server, asks, refused
from support.scenarios import save_load

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world", [2, 4])
def test_hosts_write_their_own_boxes_of_live_tensors(tmp_path, world):
    hosts.run(world, "export_live", tmp_path)
    folder = tmp_path / f"live{world}"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {key: load_file(folder / name)[key] for key, name in index["weight_map"].items()}
    assert found.keys() == save_load.host_tensors().keys()
    assert all(same_bits(found[key], value) for key, value in save_load.host_tensors().items())


def test_full_disk_of_one_host_is_an_error_on_all_and_leaves_nothing(tmp_path):
    hosts.run(2, "export_fails_on_one_host", tmp_path)


@pytest.mark.parametrize("world", [2, 4])
def test_hosts_exchange_boxes_of_live_tensors_for_the_files_of_a_store(tmp_path, world):
    with Server() as s3, s3.bucket("live"):
        (tmp_path / "s3.json").write_text(json.dumps(s3.options))
        hosts.run(world, "export_live_to_store", tmp_path)


@pytest.mark.parametrize("source", ["live", "checkpoint"])
def test_store_that_refuses_a_file_of_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path, source):
    xc.save({"w": torch.ones(100), "v": torch.zeros(100)}, tmp_path / "checkpoint")
    with Server() as s3, s3.bucket("refused") as bucket:
        with s3.failing(refused, asks("PutObject", "model-00002*")):
            rank_processes.run(refused_by_a_store, tmp_path, 2, s3.options, source)
        assert bucket.objects() == []


def refused_by_a_store(rank, world, folder, options, source):
    state = {"w": torch.ones(100), "v": torch.zeros(100)} if source == "live" else f"{folder}/checkpoint"
    with pytest.raises((OSError, xc.CheckpointError), match=r"closed|Forbidden|PermissionError"):
        xc.export(state, "s3://refused/model", max_shard_bytes=400, storage_options=options)
    with pytest.raises(xc.CheckpointError, match="checkpoint-of-nobody"):
        xc.export(f"{folder}/checkpoint-of-nobody", "s3://refused/model", storage_options=options)


@pytest.mark.parametrize("world", [2, 4])
def test_hosts_share_the_bytes_of_a_checkpoint(tmp_path, world):
    xc.save(save_load.state(mesh((4, 2))), tmp_path / "by1")
    hosts.run(world, "export_checkpoint_on_hosts", tmp_path)


def test_models_trained_by_two_hosts_compute_the_same_logits_in_transformers_and_come_back(tmp_path):
    hosts.run(2, "export_model", tmp_path)
    for name in ("llama", "mixtral"):
        expected = hugging_face.build(name)
        expected.load_state_dict(torch.load(tmp_path / f"{name}.pt", weights_only=True))
        opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert torch.equal(hugging_face.logits(opened), hugging_face.logits(expected))
        opened.save_pretrained(tmp_path / f"{name}-again", max_shard_size="20KB")
    hosts.run(2, "import_model", tmp_path)


def share_bytes(rank, world, folder):
    """Each rank writes its share of the bytes."""
    state = {f"w{n}": torch.full((100,), float(n)) for n in range(8)}
    if rank == 0:
        xc.save(state, f"{folder}/checkpoint", no_dist=True)
    torch.distributed.barrier()
    report = xc.export(f"{folder}/checkpoint", f"{folder}/model")
    assert set(report.tensors) == set(state)
    own = [None] * world
    torch.distributed.all_gather_object(own, report.bytes_written)
    assert sum(own) == 3200 and max(own) <= 1700, own


def error_of_one_rank(rank, world, folder):
    path = f"{folder}/there" if rank == 0 else f"{folder}/missing"
    if rank == 0:
        xc.save({"w": torch.ones(3)}, path, no_dist=True)
    with pytest.raises(xc.CheckpointError, match=r"there is no checkpoint in .*missing"):
        xc.export(path, f"{folder}/model")


def folder_that_one_host_does_not_see(rank, world, folder):
    real = pathlib.Path.is_dir
    if rank == 1:
        pathlib.Path.is_dir = lambda path: False if path.name.endswith(".part") else real(path)
    with pytest.raises(
        xc.CheckpointError, match=r"this host does not see .*Export to a file system that all hosts share"
    ):
        xc.export({"w": torch.ones(3)}, f"{folder}/model")
    torch.distributed.barrier()
    assert not os.path.exists(f"{folder}/model")


@pytest.mark.parametrize("scenario", [share_bytes, error_of_one_rank, folder_that_one_host_does_not_see])
def test_ranks_without_devices(tmp_path, scenario):
    rank_processes.run(scenario, tmp_path)

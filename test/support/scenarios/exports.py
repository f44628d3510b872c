"""What the hosts of exchange/test_several_processes.py do. Each function runs in every process of a group."""

import functools
import json
import os
import pathlib
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support import hosts, hugging_face
from support.meshes import mesh, put, same_bits
from support.scenarios import save_load

warnings.filterwarnings("ignore")


def share_planner(rank, world):
    """Let xc.export see this host's devices only."""
    planner = functools.partial(xc.SPMDSavePlanner, access=hosts.share_access(rank, world))
    sys.modules["torch_xla_ckpt.exchange.state_job"].SPMDSavePlanner = planner


def gathered(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def export_live(rank, world, folder):
    """Every host writes its own boxes; shared ones are divided; all get one report."""
    share_planner(rank, world)
    tensors = {key: value for key, value in save_load.state(mesh(save_load.MESHES[world]))["model"].items()}
    report = xc.export({"model": tensors}, f"{folder}/live{world}", max_shard_bytes=200_000)
    reports = gathered((report.files, report.tensors, report.bytes_written))
    assert len({str(one[:2]) for one in reports}) == 1
    total = sum(value.nbytes for value in save_load.host_tensors().values())
    own = [one[2] for one in reports]
    assert sum(own) == total and max(own) < 1.1 * total / world, own


def export_fails_on_one_host(rank, world, folder):
    """A full disk on one host is an error on all, and nothing is left."""
    share_planner(rank, world)
    tensors = save_load.state(mesh((4, 2)))["model"]
    real = os.pwrite

    def full(*args):
        raise OSError(28, "No space left on device")

    os.pwrite = full if rank == 1 else real
    with pytest.raises(xc.CheckpointError, match=r"rank 1.*No space left"):
        xc.export({"model": tensors}, f"{folder}/failed")
    os.pwrite = real
    dist.barrier()
    assert not os.path.exists(f"{folder}/failed") and not [n for n in os.listdir(folder) if n.endswith(".part")]


def export_live_to_store(rank, world, folder):
    """Every file is written by one host, which gets the boxes of the others."""
    share_planner(rank, world)
    options = json.loads(pathlib.Path(folder, "s3.json").read_text())
    state = {"model": save_load.state(mesh(save_load.MESHES[world]))["model"]}
    expected = save_load.host_tensors()
    for name, most, budget in (("many", 200_000, 1 << 20), ("one", 5 << 30, 1), ("file.safetensors", 1, 1 << 28)):
        report = xc.export(
            state, f"s3://live/{name}", max_shard_bytes=most, memory_budget=budget, storage_options=options
        )
        own = gathered(report.bytes_written)
        assert sum(own) == sum(value.nbytes for value in expected.values())
        assert sum(map(bool, own)) == (world if name == "many" else 1), own
        loaded = {"model": {}}
        xc.load(loaded, f"s3://live/{name}", storage_options=options)
        assert loaded["model"].keys() == expected.keys()
        assert all(same_bits(loaded["model"][key], value) for key, value in expected.items())
    with pytest.raises(xc.CheckpointError, match="already has"):
        xc.export(state, "s3://live/many", storage_options=options)


def export_model(rank, world, folder):
    """Train on (4, 2), and export the live model from all hosts."""
    share_planner(rank, world)
    for name in ("llama", "mixtral"):
        model = hugging_face.train(name, mesh((4, 2)))
        report = xc.export({"model": model.state_dict()}, f"{folder}/{name}", config_from=model)
        assert list(report.tied) == (["lm_head.weight"] if name == "llama" else [])
        if rank == 0:
            torch.save({key: value.cpu() for key, value in model.state_dict().items()}, f"{folder}/{name}.pt")


def import_model(rank, world, folder):
    """Load the folders that transformers wrote onto (2, 4); each host reads about its share."""
    on = mesh((2, 4))
    for name in ("llama", "mixtral"):
        expected = torch.load(f"{folder}/{name}.pt", weights_only=True)
        target = {
            key: put(torch.zeros_like(value), on, ("a", "b") if value.ndim == 2 else None)
            for key, value in expected.items()
            if key != "lm_head.weight" or name != "llama"
        }
        reader = xc.ShardReader(f"{folder}/{name}-again")
        planner = xc.SPMDLoadPlanner(access=hosts.share_access(rank, world))
        dcp.load(target, storage_reader=reader, planner=planner)
        assert reader.stats.bytes_read <= 1.05 * reader.stats.bytes_needed
        for key, value in target.items():
            assert _holds_share(value, expected[key], rank, world), key


def _holds_share(tensor, expected, rank, world):
    """Whether this host's devices hold their parts."""
    access = hosts.share_access(rank, world)(tensor)
    access.settle()
    layout = access.layout(tensor)
    found = access.fetch(tensor, layout)
    return all(same_bits(found[box], expected[box.slices]) for box in layout.boxes)


def export_checkpoint_on_hosts(rank, world, folder):
    """Processes without devices of their own share the bytes of a checkpoint."""
    report = xc.export(f"{folder}/by1", f"{folder}/from-checkpoint{world}")
    own = gathered(report.bytes_written)
    assert sum(own) == sum(value.nbytes for value in save_load.host_tensors().values())
    assert max(own) < 1.1 * sum(own) / world, own
    target = {"model": {key: torch.zeros_like(value) for key, value in save_load.host_tensors().items()}}
    xc.load(target, f"{folder}/from-checkpoint{world}")
    assert all(same_bits(target["model"][key], value) for key, value in save_load.host_tensors().items())

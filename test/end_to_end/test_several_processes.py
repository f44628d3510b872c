"""Several hosts: real processes over gloo that each hold a share of the devices."""

from collections import Counter

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support import hosts
from support.meshes import holds, mesh, same_bits
from support.scenarios import save_load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints by1, by2 and by4, saved by so many processes."""
    folder = tmp_path_factory.mktemp("hosts")
    xc.save(save_load.state(mesh(save_load.MESHES[1])), folder / "by1")
    hosts.run(2, "save", folder)
    hosts.run(4, "save", folder)
    return folder


def written(path):
    """Bytes of each key in each process's files, without the writer's framing."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    sizes = {
        (key, tuple(chunk.offsets)): chunk.sizes.numel() * saved.properties.dtype.itemsize
        for key, saved in metadata.state_dict_metadata.items()
        if hasattr(saved, "chunks")
        for chunk in saved.chunks
    }
    load = Counter()
    for index, info in metadata.storage_data.items():
        if index.offset is not None:
            load[index.fqn, info.relative_path.split("_")[2]] += sizes[index.fqn, tuple(index.offset)]
    return load


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_processes_loads_what_any_number_saved(folder, world):
    hosts.run(world, "load", folder)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_process_loads_what_several_saved(folder, world):
    target = save_load.state(mesh((1, 8)), fill=3.0)
    xc.load(target, folder / f"by{world}")
    for key, host in save_load.host_tensors().items():
        assert holds(target["model"][key], host), key


@pytest.mark.parametrize("world", [1, 2, 4])
def test_stock_dcp_loads_what_several_saved(folder, world):
    target = {"model": {key: torch.zeros_like(host) for key, host in save_load.host_tensors().items()}, "step": 0}
    dcp.load(target, checkpoint_id=folder / f"by{world}")
    for key, host in save_load.host_tensors().items():
        assert same_bits(target["model"][key], host), key
    assert target["step"] == 5


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_are_written_once_and_balanced_over_processes(folder, world):
    load = written(folder / f"by{world}")
    state = save_load.host_tensors()
    assert sum(load.values()) == sum(host.nbytes for host in state.values()) + 1000 * 70 * 8
    ranks = Counter()
    for (_, rank), nbytes in load.items():
        ranks[rank] += nbytes
    assert len(ranks) == world and max(ranks.values()) <= 1.1 * sum(ranks.values()) / world


SCENARIOS = [
    "one_fails_to_write",
    "one_asks_for_what_is_not_there",
    "what_is_created",
    "restored_from_nothing",
    "one_has_no_state",
    "processes_differ",
    "shapes_differ",
    "one_saves_alone",
    "folders_differ",
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_several_ranks(tmp_path, scenario, world):
    hosts.run(world, scenario, tmp_path)


@pytest.mark.parametrize("world", [2, 4])
def test_tensors_that_all_ranks_hold_are_written_once_and_balanced_over_ranks(tmp_path, world):
    hosts.run(world, "everyone_holds_everything", tmp_path)
    load = written(tmp_path / "shared")
    for key in ("model.replicated", "model.unmarked", "cpu"):
        own = [nbytes for (name, _), nbytes in load.items() if name == key]
        assert sum(own) > 0
    ranks = Counter()
    for (_, rank), nbytes in load.items():
        ranks[rank] += nbytes
    assert len(ranks) == world and max(ranks.values()) <= 1.1 * sum(ranks.values()) / world

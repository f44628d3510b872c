"""Ranks that read together read each byte once, get the same bits, and learn of each other's errors.

What the ranks do is in ``support/scenarios/cooperation.py``.
"""

import pytest
import torch
from safetensors.torch import save_file

import torch_xla_ckpt as xc
from support import hosts
from support.meshes import mesh
from support.scenarios import cooperation, save_load

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints, and the same tensors in files of other formats."""
    folder = tmp_path_factory.mktemp("cooperation")
    state = cooperation.full_state()
    xc.save(state, folder / "checkpoint", sync=False)
    new = {key: torch.full_like(tensor, 2) for key, tensor in state["model"].items()}
    xc.save({**state, "model": new, "step": 8}, folder / "new", sync=False)
    xc.save(save_load.state(mesh((4, 2))), folder / "meshes", sync=False)
    plain = {key: tensor.clone() for key, tensor in state["model"].items() if "complex" not in key}
    (folder / "safetensors").mkdir()
    save_file(plain, folder / "safetensors" / "model.safetensors")
    (folder / "others").mkdir()
    torch.save(plain, folder / "others" / "file.pt")
    return folder


SCENARIOS = [
    "whole_copies",
    "devices_of_several_hosts",
    "targets_differ",
    "policies",
    "objects_and_files_of_others",
    "one_reader_fails",
    "damaged_bytes",
    "short_messages",
    "loads_in_threads_do_not_cross",
    "replaced_while_read",
    "wishes_differ",
    "by_itself",
    "small_budget",
    "models_and_managers",
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_two_ranks(folder, scenario):
    hosts.run(2, scenario, folder)


@pytest.mark.parametrize("scenario", ["whole_copies", "devices_of_several_hosts", "targets_differ", "one_reader_fails"])
def test_on_four_ranks(folder, scenario):
    hosts.run(4, scenario, folder)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scenario", ["one_reader_is_killed", "one_reader_is_stopped"])
def test_a_rank_that_is_gone_is_an_error_on_all_others(folder, scenario, world):
    hosts.run(world, scenario, folder, dying=(1,))

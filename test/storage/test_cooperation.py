"""Ranks that read together read each byte once, get the same bits, and learn of each other's errors."""

import pytest

import torch_xla_ckpt as xc
from support import hosts
from support.scenarios import cooperation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cooperation")
    xc.save(cooperation.full_state(), folder / "checkpoint", sync=False)
    return folder


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scenario", ["whole_copies"])
def test_on_several_ranks(folder, scenario, world):
    hosts.run(world, scenario, folder)

"""Objects of several ranks: each gets its own if it is asked for, and one for all is saved with a warning."""

import pytest
import torch

import torch_xla_ckpt as xc
from support import hosts

pytestmark = pytest.mark.slow

SCENARIOS = [
    "each_rank_gets_its_own",
    "each_rank_gets_its_own_after_an_async_save",
    "each_rank_gets_its_own_through_dcp",
    "the_manager_keeps_each_ranks_own",
    "one_state_for_all_is_no_state_of_each",
    "objects_that_differ_are_named",
    "opaque_objects_are_encoded_once",
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_two_hosts(tmp_path, scenario):
    hosts.run(2, scenario, tmp_path)


def test_another_number_of_ranks_is_refused_or_named(tmp_path):
    for world in (3, 2, 4):
        hosts.run(world, "saved_for_another_number_of_ranks", tmp_path)


def test_a_single_process_needs_no_group(tmp_path):
    xc.save({"n": xc.PerRank({"a": 1, "t": torch.ones(2)})}, tmp_path)
    own = {"a": 0, "t": torch.zeros(2)}
    xc.load({"n": xc.PerRank(own)}, tmp_path)
    assert own["a"] == 1 and own["t"].tolist() == [1, 1]


def test_a_nested_one_is_refused_and_not_saved_for_all(tmp_path):
    with pytest.raises(xc.CheckpointError, match="top-level value"):
        xc.save({"a": {"n": xc.PerRank(1)}}, tmp_path)


def test_options_are_checked():
    with pytest.raises(ValueError, match="resize"):
        xc.PerRank(1, resize="keep")


def test_parts_that_are_left_out_need_not_fit(tmp_path):
    xc.save({"w": torch.ones(2), "n": 1}, tmp_path)
    target = {"w": torch.zeros(2), "n": xc.PerRank(5)}
    xc.load(target, tmp_path, only="w")
    assert target["n"].value == 5 and target["w"].all()
    with pytest.raises(xc.MismatchError, match="n: target has the state of rank 0 of 1"):
        xc.load(target, tmp_path)

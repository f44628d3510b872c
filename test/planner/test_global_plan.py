"""The plan of a save is used again only while nothing that it depends on has changed."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_xla_ckpt as xc
from support.boxes import count, tilings
from support.cuts import CutAccess, grid, planned, sent_plan
from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.planner import CopyPlanner
from torch_xla_ckpt.planner.global_plan import global_plan

WORLD = 4


def state(**changes):
    """A state with a value of every kind."""
    nested = {"w": torch.zeros(8, 6), "b": torch.zeros(6), "table": {3: torch.zeros(2)}, "step": 7}
    return {"model": {**nested, **changes}, "empty": torch.zeros(0, 4)}


def plans(values=None, access=None, world=WORLD):
    values = values or (lambda rank: state())
    access = access or (lambda rank: CutAccess(grid(4, 2, rank, world)))
    return [sent_plan(values(rank), access(rank)) for rank in range(world)]


def only_on_rank_2(**changes):
    return lambda rank: state(**(changes if rank == 2 else {}))


def test_equal_offers_give_the_plan_of_the_save_before():
    first = global_plan(plans())
    assert global_plan(plans()) is first
    assert global_plan(plans()) is first


def cut_with(**options):
    return lambda rank: CutAccess(grid(4, 2, rank, WORLD), **options)


def with_path(rank):
    """The same keys, from other paths."""
    values = state()
    model = values.pop("model")
    return {
        **{f"model.{key}": value for key, value in model.items() if key != "table"},
        "model": {"table": model["table"]},
        **values,
    }


CHANGES = {
    "a key": lambda: plans(lambda rank: {"other": state()["model"], "empty": torch.zeros(0, 4)}),
    "one more key": lambda: plans(lambda rank: state(new=torch.zeros(1))),
    "the order of keys": lambda: plans(lambda rank: dict(reversed(state().items()))),
    "paths": lambda: plans(with_path),
    "an integer key": lambda: plans(lambda rank: state(table={"3": torch.zeros(2)})),
    "a dtype": lambda: plans(lambda rank: state(w=torch.zeros(8, 6, dtype=torch.bfloat16))),
    "a shape": lambda: plans(lambda rank: state(w=torch.zeros(8, 4))),
    "a shape with as many elements": lambda: plans(lambda rank: state(b=torch.zeros(6, 1))),
    "requires_grad": lambda: plans(lambda rank: state(w=torch.zeros(8, 6, requires_grad=True))),
    "an object for a tensor": lambda: plans(lambda rank: state(b="text")),
    "the sharding": lambda: plans(access=cut_with(sharding="another")),
    "the boxes": lambda: plans(access=lambda rank: CutAccess(grid(2, 4, rank, WORLD))),
    "which rank has which box": lambda: plans(access=lambda rank: CutAccess(grid(4, 2, WORLD - 1 - rank, WORLD))),
    "the world size": lambda: plans(world=2),
    "requires_grad on one rank": lambda: plans(only_on_rank_2(w=torch.zeros(8, 6, requires_grad=True))),
    "a key on one rank": lambda: plans(only_on_rank_2(own=torch.zeros(3))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_anything_gives_a_new_plan(change):
    first = global_plan(plans())
    second = global_plan(change())
    assert second is not first and second.digest != first.digest
    assert global_plan(plans()) is first  # a save of something else in between changes nothing
    assert global_plan(change()) is second


def test_every_field_of_a_value_is_part_of_the_digest():
    """A field that is added later has to be added here."""
    entry = _dcp.Entry("a.3", ("a", "3"), torch.float32, (4,), False, "cut")
    changes = {
        "key": ["a.4"],
        "path": [("a.3",), ("a", 3), ("a", _dcp.IntegerKey(3))],
        "dtype": [None, torch.bfloat16, torch.int32],
        "shape": [(2, 2), (4, 1)],
        "requires_grad": [True],
        "sharding": ["", "cut otherwise"],
    }
    assert tuple(changes) == _dcp.Entry._fields
    entries = [entry, *(entry._replace(**{name: new}) for name, others in changes.items() for new in others)]
    boxes = np.array([[0, 4]])
    every = [_dcp.Offers([one], np.array([1]), boxes).packed for one in entries]
    every.append(_dcp.Offers([entry], np.array([1]), np.array([[0, 3]])).packed)
    every.append(_dcp.Offers([entry], np.array([2]), np.array([[0, 2], [2, 2]])).packed)
    assert len({packed.digest for packed in every}) == len(every)
    assert [one for packed in every for piece in packed.names for one in _dcp.decoded_entries(piece)][:-2] == entries


def several_ranks(monkeypatch):
    """Let planners believe that there are other ranks, so that they send digests of values."""
    monkeypatch.setattr("torch_xla_ckpt.planner.save.Processes", lambda group: SimpleNamespace(size=WORLD))


def test_values_that_begin_to_differ_between_ranks_give_a_new_plan(monkeypatch):
    several_ranks(monkeypatch)
    large = torch.zeros(1 << 15)

    def values(differs):
        return lambda rank: state(b=large + (rank if differs else 0))

    same, other = global_plan(plans(values(False))), global_plan(plans(values(True)))
    assert same.divergent == [] and other.divergent == ["model.b"] and same.digest == other.digest
    assert global_plan(plans(values(False))) is same and global_plan(plans(values(True))) is other
    writers = [[own for own in planned(plans(values(differs)))[1] if "model.b" in own] for differs in (False, True)]
    assert len(writers[0]) == WORLD and len(writers[1]) == 1


def test_replicas_that_may_differ_from_now_on_give_a_new_plan(monkeypatch):
    several_ranks(monkeypatch)

    def replicated(identical):
        whole = CutAccess(lambda tensor: [Box.whole(tuple(tensor.shape))], identical=identical)
        return plans(access=lambda rank: whole)

    first = global_plan(replicated(True))
    assert global_plan(replicated(False)) is not first and global_plan(replicated(True)) is first


def test_equal_but_new_values_give_the_plan_of_the_save_before(monkeypatch):
    several_ranks(monkeypatch)
    first = global_plan(plans(lambda rank: state(step=1, b=torch.ones(6))))
    assert global_plan(plans(lambda rank: state(step=2, b=torch.full((6,), 2.0)))) is first


def test_a_planner_that_records_other_paths_gets_its_own_plan():
    tensors = {"a": torch.zeros(3)}
    found = []
    for path in (("a",), ("x", "a")):
        planner = CopyPlanner({"a": path}, access=CutAccess(lambda tensor: None))
        planner.set_up_planner(tensors)
        _, metadata = planner.create_global_plan([planner.create_local_plan()])
        found.append(metadata.planner_data["a"])
    assert found == [("a",), ("x", "a")]


def test_a_failed_plan_is_not_kept():
    lacking = plans()[:-1]
    for _ in range(2):
        with pytest.raises(xc.IncompleteCheckpointError, match=r"model\.w"):
            global_plan(lacking)


def test_metadata_of_one_save_can_be_changed_without_the_next_save_seeing_it():
    planner = xc.SPMDSavePlanner()
    first = planner.create_global_plan(plans())[1]
    first.state_dict_metadata.clear()
    first.planner_data.clear()
    second = planner.create_global_plan(plans())[1]
    assert len(second.state_dict_metadata) == len(second.planner_data) == 5


@settings(max_examples=60, deadline=None)
@given(tilings(), st.integers(1, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_every_element_is_assigned_once_whoever_holds_it(tiling, world, extra, chance):
    whole, pieces = tiling
    tensor = torch.zeros(whole.sizes)
    holders = [sorted(chance.sample(range(world), chance.randint(1, world))) for _ in pieces]
    access = [
        CutAccess(lambda t, rank=rank: [box for box, own in zip(pieces, holders) if rank in own])
        for rank in range(world)
    ]
    sent = [sent_plan({"t": tensor, **{f"o{rank % (extra + 1)}": rank}}, access[rank]) for rank in range(world)]
    metadata, boxes = planned(sent)
    found = [Box(*chunk) for own in boxes for chunk in own.get("t", [])]
    assert (count(whole.sizes, found) == 1).all()
    chunks = metadata.state_dict_metadata["t"].chunks
    assert sorted((tuple(c.offsets), tuple(c.sizes)) for c in chunks) == sorted((b.offsets, b.sizes) for b in found)
    for rank, own in enumerate(boxes):
        for chunk in own.get("t", []):
            assert any(box.contains(Box(*chunk)) and rank in who for box, who in zip(pieces, holders))


def test_ranks_that_disagree_are_named():
    with pytest.raises(xc.CheckpointError, match=r"rank 0 has a tensor of shape \(8, 6\), .*rank 2 has .* \(4, 6\)"):
        global_plan(plans(only_on_rank_2(w=torch.zeros(4, 6))))


def test_a_box_that_overlaps_others_is_refused_on_whichever_rank():
    def access(rank):
        return CutAccess(
            lambda t: [Box.whole(tuple(t.shape))] if rank == 3 and t.ndim == 2 else grid(4, 2, rank, WORLD)(t)
        )

    with pytest.raises(xc.IncompleteCheckpointError, match="doubled"):
        global_plan(plans(access=access))


def test_many_small_replicas_are_balanced():
    tensors = {f"t{n}": torch.zeros(random.Random(n).randint(1, 3000)) for n in range(500)}
    sent = [sent_plan(tensors, CutAccess(lambda t: [Box.whole(tuple(t.shape))])) for _ in range(WORLD)]
    _, boxes = planned(sent)
    loads = [sum(int(np.prod(size)) for chunks in own.values() for _, size in chunks) for own in boxes]
    assert max(loads) <= 1.02 * sum(loads) / WORLD


def test_a_plan_whose_items_became_a_list_is_planned_alike(monkeypatch):
    """A subclass of the planner, or a storage writer, may make a list of a plan's items."""
    several_ranks(monkeypatch)
    large = torch.zeros(1 << 15)
    sent = plans(lambda rank: state(b=large + rank, table={3: torch.zeros(2)}))
    metadata, boxes = planned(sent)
    listed = [replace(plan, items=[item for item in plan.items if item.index.fqn != "empty"]) for plan in sent]
    found, found_boxes = planned(listed)
    assert len(boxes) == len(found_boxes) == WORLD
    assert global_plan(listed).divergent == global_plan(sent).divergent == ["model.b"]
    del metadata.planner_data["empty"], metadata.state_dict_metadata["empty"]
    assert found == metadata and repr(found.planner_data) == repr(metadata.planner_data)

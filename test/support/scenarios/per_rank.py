"""What the hosts of state/test_per_rank.py do. Each function runs in every process of a group."""

import dataclasses
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support.scenarios.save_load import record_warnings

warnings.filterwarnings("ignore")


class Loader:
    """A data loader with a position; before its first batch it has no state."""

    def __init__(self, position=None):
        self.position = position

    def state_dict(self):
        if self.position is None:
            return {}
        return {"position": self.position, "seen": torch.full((3,), self.position), "by epoch": {0: [self.position]}}

    def load_state_dict(self, state):
        assert state["seen"].tolist() == [state["position"]] * 3 and state["by epoch"] == {0: [state["position"]]}
        self.position = state["position"]


def each_rank_gets_its_own(rank, world, folder):
    path = Path(folder) / "own"
    state = {"w": torch.ones(4), "loader": xc.PerRank(Loader(100 + rank)), "plain": xc.PerRank({"n": rank})}
    with record_warnings() as said:
        xc.save({**state, "number": xc.PerRank(rank)}, path)
    assert not said
    for loader in (Loader(), Loader(-1)):
        plain, number = {"n": -1}, xc.PerRank(-1)
        target = {"w": torch.zeros(4), "loader": xc.PerRank(loader), "plain": xc.PerRank(plain), "number": number}
        with record_warnings() as said:
            report = xc.load(target, path)
        assert not said
        assert (loader.position, plain, number.value) == (100 + rank, {"n": rank}, rank)
        assert not report.missing and not report.unexpected


def each_rank_gets_its_own_after_an_async_save(rank, world, folder):
    path = Path(folder) / "async"
    loader = Loader(rank)
    with xc.SPMDStager() as stager:
        handle = xc.async_save({"w": torch.ones(4), "loader": xc.PerRank(loader)}, path, stager=stager)
        loader.position = -5
        handle.result()
    dist.barrier()
    xc.load({"loader": xc.PerRank(loader)}, path)
    assert loader.position == rank


def each_rank_gets_its_own_through_dcp(rank, world, folder):
    path = Path(folder) / "dcp"
    dcp.save({"n": xc.PerRank({"n": rank})}, checkpoint_id=path, planner=xc.SPMDSavePlanner())
    for options in ({"planner": xc.SPMDLoadPlanner()}, {}):
        mine = {"n": -1}
        dcp.load({"n": xc.PerRank(mine)}, checkpoint_id=path, **options)
        assert mine == {"n": rank}


def the_manager_keeps_each_ranks_own(rank, world, folder):
    path = Path(folder) / "run"
    torch.manual_seed(rank)
    with xc.CheckpointManager(path, rng=True, chkpt_on_preemption=False) as manager:
        manager.save(0, {"w": torch.ones(4), "loader": xc.PerRank(Loader(rank))}, force=True)
        expected = torch.rand(3)
        loader = Loader()
        assert manager.restore_latest({"w": torch.zeros(4)}, loader=xc.PerRank(loader)) == 0
        assert loader.position == rank and torch.equal(torch.rand(3), expected)


def saved_for_another_number_of_ranks(rank, world, folder):
    """Run on three hosts, and then on two and on four."""
    path = Path(folder) / "resized"
    if world == 3:
        xc.save({"w": torch.ones(4), "loader": xc.PerRank(Loader(rank))}, path)
        return
    loader, w = Loader(-1), torch.zeros(4)
    message = rf"(?s)loader: target has the state of rank \d of {world}, .*3 ranks \(0 to 2\).*Nothing was loaded"
    with pytest.raises(xc.MismatchError, match=message):
        xc.load({"w": w, "loader": xc.PerRank(loader)}, path)
    assert loader.position == -1 and not w.any()
    with record_warnings() as said:
        xc.load({"w": w, "loader": xc.PerRank(loader, resize="warn")}, path)
    assert loader.position == (rank if rank < 3 else -1) and w.all()
    if rank == 3 or world == 2:
        assert any("loader: the checkpoint has the state of 3 ranks" in text for text in said)


def one_state_for_all_is_no_state_of_each(rank, world, folder):
    path = Path(folder) / "one"
    xc.save({"loader": {"position": 3}}, path)
    with pytest.raises(xc.MismatchError, match="one state for all ranks: load it without PerRank"):
        xc.load({"loader": xc.PerRank(Loader(1))}, path)


@dataclasses.dataclass
class Options:
    rate: float
    names: tuple


class Opaque:
    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return Opaque, (self.value,)


def differing(rank):
    return {
        "number": rank,
        "text": f"rank {rank}",
        "nested": {"list": [1, {"deep": (rank, 2)}]},
        "array": np.array([rank]),
        "options": Options(0.1, (rank,)),
        "opaque": Opaque(rank),
        "set": {rank},
    }


def alike(rank):
    """Equal on all ranks, and pickled in different ways."""
    shared = "".join(["a", "b"])
    pairs = [(key, {key: 1.5}) for key in ("x", "y", "z")]
    return {
        "dict": dict(pairs if rank else reversed(pairs)),
        "shared": [shared, shared] if rank else ["".join(["a", "b"]), "".join(["a", "b"])],
        "set": {"one", "two", "three", "four", "five"},  # ordered by a hash that differs between processes
        "nan": float("nan"),
        "none": None,
        "array": np.arange(6).reshape(2, 3).T if rank else np.ascontiguousarray(np.arange(6).reshape(2, 3).T),
        "tensors": (torch.ones(2), {"a": torch.arange(4)[::2] if rank else torch.tensor([0, 2])}),
        "options": Options(0.1, ("a", 1)),
        "opaque": Opaque(3),
    }


def objects_that_differ_are_named(rank, world, folder):
    state = {"differ": differing(rank), "alike": alike(rank), f"own{rank}": {"n": rank}}
    named = {f"differ.{key}" for key in state["differ"] if key != "nested"} | {"differ.nested.list.1.deep"}

    def require(said):
        if rank == 0:
            (text,) = [text for text in said if "differ between ranks" in text]
            keys = text.partition("saved: ")[2].partition(". To save")[0].split(", ")
            assert set(keys) == named, set(keys) ^ named
            assert "torch_xla_ckpt.PerRank" in text
        else:
            assert not said

    with record_warnings() as said:
        xc.save(state, Path(folder) / "objects")
    require(said)
    del state["alike"]["opaque"], state["differ"]["opaque"], state["differ"]["options"]  # pickled as they are
    named -= {"differ.opaque", "differ.options"}
    with record_warnings() as said, xc.SPMDStager() as stager:
        xc.async_save({**state, "w": torch.ones(3)}, Path(folder) / "async objects", stager=stager).result()
    require(said)
    dist.barrier()
    target = {"differ": {}, "alike": {}}
    xc.load(target, Path(folder) / "objects", allow_types=[Options, Opaque])
    assert target["differ"]["number"] == 0 and target["differ"]["opaque"].value == 0
    found = [None] * world
    dist.all_gather_object(found, json.dumps(target["differ"]["nested"]))
    assert set(found) == {'{"list": [1, {"deep": [0, 2]}]}'}


def opaque_objects_are_encoded_once(rank, world, folder):
    counted = []

    class Counted:
        def __reduce__(self):
            counted.append(1)
            return Opaque, (1,)

    xc.save({"a": Counted(), f"own{rank}": Counted(), "plain": {"b": [1, 2]}}, Path(folder) / "once")
    assert len(counted) == 2

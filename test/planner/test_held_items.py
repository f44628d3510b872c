"""Ranks keep the items of earlier saves. What they write is right, whoever has lost or changed what."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support import rank_processes
from support.cuts import CutAccess, grid
from support.records import assert_records_are_a_full_encoding
from torch_xla_ckpt import _dcp
from torch_xla_ckpt.planner import global_plan, held
from torch_xla_ckpt.storage import records

WORLD = 3


def state(rank, seed=0, **more):
    """A matrix that is cut over the ranks, a value of each rank's own, values that all ranks have, and an object."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.rand(240, 64, generator=generator)
    own = {f"own{rank}.{n}": torch.full((4,), 100.0 * seed + 10 * rank + n) for n in range(3)}
    return {
        "w": w,
        "again": w + 1,
        **own,
        "shared": torch.arange(3000.0) + seed,
        "note": f"save {seed}" * (1 + seed),
        **more,
    }


def planner_of(rank, world, cls=xc.SPMDSavePlanner):
    return cls(access=CutAccess(grid(24, 4, rank, world)))


class Exchange:
    """What DCP does with the plans of several ranks, in one process: each rank has a memory of its own."""

    def __init__(self, monkeypatch, world=WORLD):
        self.world = world
        self.kept = [[] for _ in range(world)]
        self._patch = monkeypatch

    def __call__(self, values=state, cls=lambda rank: xc.SPMDSavePlanner):
        """Plan a save. Returns what was sent to each rank, and what each rank is about to write."""
        planners = [planner_of(rank, self.world, cls(rank)) for rank in range(self.world)]
        plans = []
        for rank, planner in enumerate(planners):
            self._patch.setattr(held, "_kept", self.kept[rank])
            planner.set_up_planner(values(rank))
            plans.append(pickle.loads(pickle.dumps(planner.create_local_plan())))
        answers, _ = planners[0].create_global_plan(plans)
        answers = [pickle.loads(pickle.dumps(answer)) for answer in answers]
        sent = [type(answer.items) for answer in answers]
        written = []
        for rank, (planner, answer) in enumerate(zip(planners, answers)):
            self._patch.setattr(held, "_kept", self.kept[rank])
            items = planner.finish_plan(answer).items
            written.append([(item.index.fqn, tuple(item.index.offset or ())) for item in items])
        return sent, written


def expected(monkeypatch, *arguments, **options):
    """What the ranks write if nobody has kept anything."""
    return Exchange(monkeypatch)(*arguments, **options)[1]


def test_items_are_sent_once_while_nothing_changes(monkeypatch):
    exchange = Exchange(monkeypatch)
    sent, first = exchange()
    assert sent == [_dcp.SentItems] * WORLD
    for seed in (1, 2):
        sent, again = exchange(lambda rank, seed=seed: state(rank, seed))
        assert sent == [_dcp.HeldItems] * WORLD and again == first


def test_a_coordinator_that_was_restarted_plans_again_and_may_still_refer_to_equal_items(monkeypatch):
    exchange = Exchange(monkeypatch)
    _, first = exchange()
    global_plan._kept.clear()
    assert exchange()[1] == first


def test_a_rank_that_was_restarted_gets_its_items(monkeypatch):
    exchange = Exchange(monkeypatch)
    _, first = exchange()
    exchange.kept[1].clear()
    sent, again = exchange()
    assert sent == [_dcp.HeldItems, _dcp.SentItems, _dcp.HeldItems] and again == first


def changed_on_rank_2(**more):
    return lambda rank: state(rank, **(more if rank == 2 else {}))


CHANGES = {
    "a key on one rank": changed_on_rank_2(new=torch.zeros(2)),
    "a key on all ranks": lambda rank: state(rank, a_new_one=torch.zeros(2)),
    "the order of keys": lambda rank: dict(reversed(state(rank).items())),
    "a shape": lambda rank: state(rank, again=torch.zeros(120, 64)),
    "fewer keys": lambda rank: {key: value for key, value in state(rank).items() if key != "again"},
    "an object for a tensor": lambda rank: state(rank, shared="text"),
    "a rank without a shared value": lambda rank: {k: v for k, v in state(rank).items() if rank or k != "shared"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_gives_every_rank_the_items_of_the_new_plan(change, monkeypatch):
    exchange = Exchange(monkeypatch)
    first, other = expected(monkeypatch), expected(monkeypatch, change)
    assert first != other
    for values, wanted in ((state, first), (change, other), (change, other), (state, first), (change, other)):
        assert exchange(values)[1] == wanted


def test_equal_offers_whose_writers_change_are_sent_again(monkeypatch):
    """What a rank offers can be the same while another rank's offers, and so the writers of replicas, change."""
    exchange = Exchange(monkeypatch)
    exchange()
    assert exchange()[0] == [_dcp.HeldItems] * WORLD
    sent, written = exchange(CHANGES["a rank without a shared value"])
    assert _dcp.SentItems in sent[1:], "the writers of the shared value have changed"
    assert written == expected(monkeypatch, CHANGES["a rank without a shared value"])


def test_what_a_rank_does_not_have_is_an_error(monkeypatch):
    monkeypatch.setattr(held, "_kept", [])
    planner = planner_of(0, 1)
    planner.set_up_planner(state(0))
    plan = planner.create_local_plan()
    with pytest.raises(xc.CheckpointError, match="does not have"):
        planner.finish_plan(replace(plan, items=_dcp.HeldItems(b"1" * 16)))


def test_only_few_items_are_kept(monkeypatch):
    exchange = Exchange(monkeypatch)
    for n in range(5):
        exchange(lambda rank, n=n: state(rank, **{f"new{n}": torch.zeros(1)}))
    assert [len(kept) for kept in exchange.kept] == [2] * WORLD


# Subclasses whose plans change


def dropping(*keys):
    """A planner that lists its items, and leaves some out."""

    class Dropping(xc.SPMDSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            return replace(plan, items=[item for item in plan.items if item.index.fqn not in keys])

    return Dropping


def test_a_subclass_that_leaves_items_out_gets_items_by_their_keys(monkeypatch):
    """Ranks number their values. A rank that has left one out numbers them otherwise than the coordinator."""
    exchange = Exchange(monkeypatch)
    _, whole = exchange()
    for _ in range(2):
        sent, written = exchange(cls=lambda rank: dropping(f"own{rank}.0", "again"))
        assert sent == [list] * WORLD
        for rank, (items, all_items) in enumerate(zip(written, whole)):
            assert sorted(items) == sorted(i for i in all_items if i[0] not in (f"own{rank}.0", "again"))
    assert exchange()[1] == whole


def test_a_subclass_on_one_rank_only_changes_nothing_for_the_others(monkeypatch):
    exchange = Exchange(monkeypatch)
    exchange()
    sent, written = exchange(cls=lambda rank: dropping("own1.0") if rank == 1 else xc.SPMDSavePlanner)
    assert sent[1] is list
    assert [key for key, _ in written[1] if key.startswith("own")] == ["own1.1", "own1.2"]


# The same with real processes and files


def target(world, seed=0, more=()):
    values = {key: value for rank in range(world) for key, value in state(rank, seed).items()}
    empty = {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in values.items()}
    return values, empty


def check(path, metadata, rank, world, seed, without=()):
    """Check the records byte by byte, and every value, in the process of the coordinator."""
    if rank:
        return
    assert_records_are_a_full_encoding(path, metadata)
    values, empty = target(world, seed)
    for key in without:
        del values[key], empty[key]
    xc.load(empty, path, no_dist=True)
    for key, value in values.items():
        assert torch.equal(empty[key], value) if isinstance(value, torch.Tensor) else empty[key] == value, key
    assert xc.verify(path).ok


class Broken(xc.SPMDSavePlanner):
    """A planner that fails when it is asked for data."""

    def resolve_data(self, write_item):
        raise OSError("no data")


def saves_in_turn(rank, world, folder):
    """Saves that forget, change, fail and alternate; each is loaded and compared."""
    one, two = Path(folder) / "one", Path(folder) / "two"

    def save(path, seed, cls=xc.SPMDSavePlanner, **more):
        writer = xc.ShardWriter(path, sync=False, threads=1 + seed % 3)
        return dcp.save(state(rank, seed, **more), storage_writer=writer, planner=planner_of(rank, world, cls))

    for seed in range(4):
        check(one, save(one, seed), rank, world, seed)
    check(two, save(two, 4), rank, world, 4)  # another path, which changes nothing in the plan
    if rank == 0:  # the coordinator forgets everything
        global_plan._kept.clear()
        records._kept.clear()
    check(one, save(one, 5), rank, world, 5)
    if rank == 1:
        held._kept.clear()
    check(one, save(one, 6), rank, world, 6)
    with pytest.raises(dcp.api.CheckpointException):  # a save that breaks off after the plan
        save(one, 7, Broken if rank == 1 else xc.SPMDSavePlanner)
    check(one, save(one, 8), rank, world, 8)
    save(two, 9, again=torch.zeros(12, 5), new="a new key")  # another state in turn
    check(one, save(one, 10), rank, world, 10)
    dropped = [f"own{rank}.1" for rank in range(world)]
    for seed in (11, 12):
        check(one, save(one, seed, dropping(f"own{rank}.1")), rank, world, seed, without=dropped)
    check(one, save(one, 13), rank, world, 13)
    dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_saves_in_turn_write_what_each_rank_has(tmp_path, world):
    rank_processes.run(saves_in_turn, tmp_path, world)

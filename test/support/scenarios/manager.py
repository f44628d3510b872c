"""What the hosts of manager/test_several_processes.py do. Each function runs in every process of a group."""

import itertools
import os
import random
import signal
import threading
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torch_xla_ckpt as xc

warnings.filterwarnings("ignore")


def state(n, rank=0):
    return {"t": torch.full((20,), float(n)), "n": n, f"own{rank}": rank * 100 + n}


def gathered(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def steps_and_decisions_agree(rank, world, folder):
    path = Path(folder) / "run"
    own = random.Random(rank)
    with xc.CheckpointManager(path, keep=xc.keep.Latest(2), when=xc.when.Every(seconds=0.1)) as manager:
        taken = []
        for step in range(60):
            threading.Event().wait(own.random() * 0.01)
            dist.barrier()  # of the training loop
            if (manager.save if step % 3 == 0 else manager.save_async)(step, state(step, rank), metrics={"loss": step}):
                taken.append(step)
        manager.wait()
        dist.barrier()
        assert 2 <= len(taken) < 40 and gathered(taken) == [taken] * world
        assert gathered(manager.all_steps()) == [taken[-2:]] * world
        assert gathered(manager.best_step("loss")) == [taken[-2]] * world
        assert sorted(one.step for one in manager.history()) == taken  # a later save may commit before an async one
        target = state(-1, rank)
        assert gathered(manager.restore_latest(target)) == [taken[-1]] * world
        assert target["n"] == taken[-1] and target[f"own{rank}"] == rank * 100 + taken[-1]


def all_ranks_are_idle_at_the_same_steps(rank, world, folder):
    path = Path(folder) / "idle"
    own = random.Random(rank)
    with xc.CheckpointManager(path, when=xc.when.Idle(seconds=0, blocking=1)) as manager:
        taken = []
        for step in itertools.count():
            threading.Event().wait(own.random() * 0.01)
            dist.barrier()  # of the training loop
            if manager.save_async(step, state(step, rank)):
                taken.append(step)
            if len(taken) == 4:
                break
        manager.wait()
        assert gathered(taken) == [taken] * world
        # Right after a step that was taken, its save is still under way.
        assert all(later - earlier > 1 for earlier, later in itertools.pairwise(taken))
        assert gathered(manager.all_steps()) == [taken] * world


def a_damaged_step_is_skipped_by_all(rank, world, folder):
    path = Path(folder) / "damaged"
    with xc.CheckpointManager(path, 1) as manager:
        for step in range(3):
            manager.save(step, {**state(step), f"large{rank}": torch.rand(1000)})
        dist.barrier()
        if rank == 0:  # in what only the last rank reads
            (data,) = (path / "2").glob(f"__{world - 1}_0-*.distcp")
            content = bytearray(data.read_bytes())
            content[len(content) // 2] ^= 1
            data.write_bytes(content)
        dist.barrier()
        target = {**state(-1), f"large{rank}": torch.zeros(1000)}
        assert gathered(manager.restore_latest(target)) == [1] * world
        assert target["n"] == 1 and target["t"].eq(1).all() and gathered(manager.all_steps()) == [[0, 1]] * world
        with pytest.raises(xc.CheckpointError, match="there is no step 7"):
            manager.restore(7, target)


def folders_of_their_own(rank, world, folder):
    path = Path(folder) / (f"disk{rank}" if rank else "disk0")
    ranks = ", ".join(map(str, range(1, world)))
    with pytest.raises(xc.CheckpointError, match=rf"ranks {ranks} do not see what rank 0 .* one shared folder"):
        xc.CheckpointManager(path, 1)


def a_folder_that_rank_0_cannot_write(rank, world, folder):
    path = Path(folder) / "file"
    if rank == 0:
        path.write_text("")
    dist.barrier()
    with pytest.raises(xc.CheckpointError, match="cannot be written"):
        xc.CheckpointManager(path / "run", 1)


def one_is_told_to_end(rank, world, folder):
    """One process gets SIGTERM; all save the same step once, and know."""
    path = Path(folder) / "preempted"
    with xc.CheckpointManager(path, 1000) as manager:
        taken, reached = [], []
        for step in range(1, 12):
            if step == 4 and rank == world - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.save_async(step, state(step)):
                taken.append(step)
            if manager.reached_preemption(step):
                reached.append(step)
                break
        assert gathered((taken, reached)) == [([5], [5])] * world  # what is told at 4 is known at 5
    dist.barrier()
    with xc.CheckpointManager(path, 1000) as manager:
        assert manager.all_steps() == [5]


def random_generators_are_each_processes_own(rank, world, folder):
    path = Path(folder) / "rng"
    torch.manual_seed(rank)
    torch.rand(3 + rank)
    with xc.CheckpointManager(path, 1, rng=True) as manager:
        manager.save(1, {"n": 1})
        drawn = torch.rand(2)
        torch.manual_seed(99)
        assert manager.restore_latest({"n": 0}) == 1
        assert torch.equal(torch.rand(2), drawn)
    assert len({tuple(one.tolist()) for one in gathered(drawn)}) == world


def what_fails_on_one_is_raised_on_all(rank, world, folder):
    path = Path(folder) / "fails"
    manager = xc.CheckpointManager(path, 1)
    manager.save(1, state(1))
    write = xc.ShardWriter.write_data
    if rank == world - 1:
        xc.ShardWriter.write_data = full
    manager.save_async(2, state(2, rank))
    with pytest.raises(xc.CheckpointError, match=f"rank {world - 1}: OSError: no space left"):
        manager.wait()
    xc.ShardWriter.write_data = write
    dist.barrier()
    assert manager.all_steps() == [1]
    manager.save(3, state(3))
    manager.close()


class Unpicklable:
    def __reduce__(self):
        raise ValueError("no pickle")


def what_one_cannot_copy_does_not_hold_up_the_others(rank, world, folder):
    """The other ranks learn of it at their next call, which saves all the same: so no rank saves alone."""
    path = Path(folder) / "copies"
    errors = []
    with xc.CheckpointManager(path, 1, timeout=timedelta(seconds=20)) as manager:
        for step in range(8):
            one = {**state(step, rank), "one": Unpicklable() if (rank, step) == (world - 1, 2) else 1}
            try:
                manager.save_async(step, one, metrics={"loss": "none" if (rank, step) == (0, 5) else 1})
            except (ValueError, xc.CheckpointError) as error:
                errors.append((step, str(error)))
        manager.wait()
        assert manager.all_steps() == [0, 1, 3, 4, 6, 7]
    texts = {2: "no pickle", 3: "no pickle", 5: "could not convert string", 6: "could not convert string"}
    assert all(texts[step] in text for step, text in errors), errors
    raised_at = gathered([step for step, _ in errors])
    assert raised_at[0] == [3, 5] and raised_at[-1] == [2, 6] and raised_at[1:-1] == [[3, 6]] * (world - 2)


def groups_of_which_one_rank_has_more(rank, world, folder):
    """Rank 1 is in more groups than rank 0. Managers and cooperative loads of both create groups all the same."""
    timeout = timedelta(seconds=20)
    first = dist.new_group([0, 1], timeout=timeout)
    for _ in range(2):
        dist.new_group([*range(1, world)], timeout=timeout)
    if rank < 2:
        with xc.CheckpointManager(Path(folder) / "more", 1, process_group=first, timeout=timeout) as manager:
            manager.save_async(1, state(1, rank))
            manager.wait()
        found = {"t": torch.zeros(20)}
        xc.load(found, Path(folder) / "more" / "1", cooperative=True, process_group=first)
        assert found["t"].eq(1).all()
    dist.barrier()


def full(self, plan, planner):
    raise OSError("no space left on device")

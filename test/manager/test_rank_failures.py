"""A manager on several ranks: all make the same decisions, and an error on one rank names that rank on all."""

import contextlib
import logging
import os
import re
import shutil
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torch_xla_ckpt as xc
from support.rank_processes import run
from support.s3 import Server, refused
from torch_xla_ckpt.coordination import Processes

pytestmark = pytest.mark.slow

SHORT = timedelta(seconds=2)
LONG = timedelta(seconds=60)


def state(n):
    return {"t": torch.full((8,), float(n)), "n": n}


def gathered(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def manager(path, timeout=LONG, **options):
    return xc.CheckpointManager(path, **{"chkpt_on_preemption": False, "timeout": timeout, "sync": False, **options})


@contextlib.contextmanager
def raises(*parts):
    """Expect a ``CheckpointError`` whose text matches all patterns."""
    try:
        yield
    except xc.CheckpointError as error:
        missing = [part for part in parts if not re.search(part, str(error))]
        assert not missing, f"{missing} is not in: {error}"
    else:
        raise AssertionError("nothing was raised")


# After wait


def steps_are_the_same_after_wait(rank, world, folder, url, options):
    with manager(url, max_to_keep=2, storage_options=options) as saving:
        for step in range(6):
            (saving.save if step % 2 else saving.save_async)(step, state(step), force=True)
            saving.wait()
            expected = list(range(max(0, step - 1), step + 1))
            assert saving.all_steps() == expected, (rank, saving.all_steps())
            assert saving.latest_step() == step
            if rank == world - 1 and options is None:
                folders = sorted(int(name) for name in os.listdir(url) if name.isdigit())
                assert folders == expected  # the files are gone too
            dist.barrier()
        for step in (6, 7):  # and without wait, when save returns
            saving.save(step, state(step), force=True)
            assert saving.all_steps() == [step - 1, step], (rank, saving.all_steps())
            dist.barrier()
        assert gathered([verdict.step for verdict in saving.plan_retention()]) == [[6, 7]] * world


@pytest.mark.parametrize("world", [2, 3])
def test_all_steps_is_the_same_on_all_ranks_after_wait(tmp_path, world):
    run(steps_are_the_same_after_wait, tmp_path, world, str(tmp_path / "run"), None)


def test_all_steps_is_the_same_on_all_ranks_after_wait_over_an_object_store(tmp_path):
    with Server() as server, server.bucket("ranks") as bucket:
        bucket["run/0/notes.txt"] = b"mine"  # so that the folder of a deleted step stays
        run(steps_are_the_same_after_wait, tmp_path, 2, f"s3://{bucket.name}/run", server.options)


def each_rank_waits_at_another_step(rank, world, folder):
    with manager(f"{folder}/run", max_to_keep=1) as saving:
        for step in range(4):
            saving.save(step, state(step), force=True)
            if rank == step % world:
                saving.wait()


def test_wait_on_one_rank_does_not_hang(tmp_path):
    run(each_rank_waits_at_another_step, tmp_path)


# Failed saves


def failed_save_does_not_count_on_any_rank(rank, world, folder):
    def failing(self, plan, planner):
        raise OSError("disk on fire")

    write = xc.ShardWriter.write_data
    for method in ("save", "save_async"):
        with manager(f"{folder}/{method}", when=xc.when.First() | xc.when.Every(seconds=3600)) as saving:
            if rank == world - 1:
                xc.ShardWriter.write_data = failing
            taken = []
            with raises(f"rank {world - 1}: OSError: disk on fire"):
                taken.append(getattr(saving, method)(1, state(1)))
                saving.wait()
            xc.ShardWriter.write_data = write
            dist.barrier()
            for step in range(2, 8):
                if getattr(saving, method)(step, state(step)):
                    taken.append(step)
            saving.wait()
            assert gathered(taken) == [taken] * world
            assert len([step for step in taken if step is not True]) == 1, taken  # it was made again, once
            assert saving.all_steps() == taken[-1:]
            dist.barrier()


def failed_save_on_preemption_is_repeated(rank, world, folder):
    def failing(self, plan, planner):
        raise OSError("disk on fire")

    write = xc.ShardWriter.write_data
    for method in ("save", "save_async"):
        with manager(f"{folder}/preempted-{method}", save_interval=1000, chkpt_on_preemption=True) as saving:
            saving._preemption._sigterm.received = rank == 1
            failed, taken = [], []
            if rank == 0:
                xc.ShardWriter.write_data = failing
            for step in range(1, 10):
                try:
                    if getattr(saving, method)(step, state(step)):
                        taken.append(step)
                    saving.wait()
                except xc.CheckpointError:
                    failed.append(step)
                    xc.ShardWriter.write_data = write
                dist.barrier()
            assert failed == [2] and gathered(taken) == [taken] * world  # told at 1, known at 2
            assert saving.all_steps() == taken[-1:] and saving.reached_preemption(10), taken
            dist.barrier()


@pytest.mark.parametrize("scenario", [failed_save_does_not_count_on_any_rank, failed_save_on_preemption_is_repeated])
def test_save_that_failed_on_one_rank_is_repeated_at_the_same_step_on_all_ranks(tmp_path, scenario):
    run(scenario, tmp_path)


# Errors on one rank


def bad_arguments_of_one_rank(rank, world, folder):
    path = f"{folder}/bad"
    with manager(path) as saving:
        for metrics, metadata, what in (({"loss": "abc"}, None, "'abc'"), (None, {1, 2}, "set")):
            given = {"metrics": metrics, "metadata": metadata} if rank == 1 else {"metrics": {"loss": 1.0}}
            for method in (saving.save, saving.save_async):
                try:
                    method(0, state(0), force=True, **given)
                    saving.wait()
                except (ValueError, TypeError) as error:
                    assert rank == 1 and what in str(error)
                except xc.CheckpointError as error:
                    assert rank == 0 and "rank 1" in str(error) and what in str(error), error
                else:
                    raise AssertionError("nothing was raised")
                dist.barrier()
        saving.save(1, state(1), force=True)
        saving.wait()
        assert saving.all_steps() == [1]


def rank_0_cannot_read_the_run(rank, world, folder):
    path = f"{folder}/unreadable"
    with manager(path) as saving:
        saving.save(1, state(1), force=True)
        saving.wait()
        dist.barrier()

        def broken():
            raise PermissionError("denied")

        if rank == 0:
            saving._run.steps.numbers = broken
        with raises("rank 0: PermissionError: denied", path):
            saving.restore_latest(state(0))
        with raises("rank 0: there is no step 7", path):
            saving.restore(7, state(0)) if rank else _without_listing(saving, 7)
        dist.barrier()


def _without_listing(saving, step):
    del saving._run.steps.numbers
    saving.restore(step, state(0))


def one_rank_cannot_see_the_folder(rank, world, folder):
    """The error of a rank that cannot read the folder reaches the other ranks."""
    from torch_xla_ckpt.manager import preflight

    path = f"{folder}/blind"
    preflight._visibility_error = lambda folder, token: "RuntimeError: the mount is gone" if rank == 1 else None
    with raises("ranks 1 do not see", "the mount is gone", path):
        manager(path)


def errors_in_collectives_reach_all_ranks(rank, world, folder):
    own = Processes(None)
    with raises("rank 1: ValueError: no" if rank != 1 else "no", "reading the thing" if rank != 1 else ""):
        try:
            with own.agreed("reading the thing"):
                if rank == 1:
                    raise ValueError("no")
        except ValueError as error:
            raise xc.CheckpointError(str(error)) from error
    assert own.from_first(lambda: rank + 5, "asking") == 5
    with raises("rank 0: KeyError: 'x' .*asking"):
        own.from_first(lambda: {}["x"], "asking")


@pytest.mark.parametrize(
    "scenario",
    [
        bad_arguments_of_one_rank,
        rank_0_cannot_read_the_run,
        one_rank_cannot_see_the_folder,
        errors_in_collectives_reach_all_ranks,
    ],
)
def test_error_on_one_rank_is_raised_on_all_ranks(tmp_path, scenario):
    run(scenario, tmp_path)


def a_manager_without_the_permission_to_delete(rank, world, folder, options):
    with manager("s3://closed/run", storage_options=options) as saving:
        saving.save(1, state(1), force=True)
        saving.wait()
        assert saving.all_steps() == [1]


def test_bucket_without_permission_to_delete_can_be_used_on_all_ranks(tmp_path):
    with Server() as server, server.bucket("closed"):
        denied = server.failing(refused, lambda request: request.operation in ("DeleteObjects", "DeleteObject"))
        with denied:
            run(a_manager_without_the_permission_to_delete, tmp_path, 2, server.options)


# Different paths


def ranks_save_other_steps(rank, world, folder):
    path = f"{folder}/steps"
    parts = {**state(1), f"part{rank}": torch.ones(1000)}  # so that each rank has something to write
    told = f"rank 0 saves to {path}/1, rank 1 to {path}/2", "pass the same path on all ranks"
    with manager(path) as saving:
        with raises("was not committed", *told):
            saving.save(1 + rank, parts, force=True)
        saving.save_async(1 + rank, parts, force=True)
        with raises("was not committed", *told):
            saving.wait()
        saving.save(5, parts, force=True)
        assert saving.all_steps() == [5]
    with raises("was not committed", f"rank 0 saves to {path}/0, rank 1 to {path}/1"):
        xc.save(parts, f"{path}/{rank}")


def ranks_load_from_other_paths(rank, world, folder):
    for name in ("a", "b"):
        xc.save(state(1), f"{folder}/{name}")
    if rank == 0:
        shutil.copytree(f"{folder}/a", f"{folder}/copy")  # as if one storage were mounted at two paths
    dist.barrier()
    told = f"rank 0 loads from {folder}/a, rank 1 from {folder}/"
    with raises("the processes have found different ones", f"{told}b", "pass the same path on all ranks"):
        xc.load(state(0), f"{folder}/{'ab'[rank]}")
    said = []
    logger = logging.getLogger("torch_xla_ckpt.storage.reader")
    logger.setLevel(logging.WARNING)
    logger.addFilter(lambda record: said.append(record.getMessage()))
    target = state(0)
    xc.load(target, f"{folder}/{('a', 'copy')[rank]}")
    assert target["n"] == 1
    assert len(said) == (rank == 0) and all(f"{told}copy" in text for text in said), said


def ranks_open_other_paths(rank, world, folder):
    with raises("ranks 1 do not see", f"rank 0 looks in {folder}/run0, rank 1 in {folder}/run1"):
        manager(f"{folder}/run{rank}")


@pytest.mark.parametrize("scenario", [ranks_save_other_steps, ranks_load_from_other_paths, ranks_open_other_paths])
def test_error_names_the_paths_if_ranks_use_different_ones(tmp_path, scenario):
    run(scenario, tmp_path)


# Missing ranks


def _absent(folder, world):
    """Stay away until the other ranks have named the missing rank."""
    store = dist.distributed_c10d._get_default_store()
    store.wait([f"said{rank}" for rank in range(world) if rank != 1], timedelta(seconds=60))


def _said(rank):
    dist.distributed_c10d._get_default_store().set(f"said{rank}", "1")


def a_rank_never_saves(rank, world, folder):
    path = f"{folder}/absent"
    saving = manager(path, timeout=SHORT)
    saving.save(0, state(0), force=True)
    if rank == 1:
        return _absent(folder, world)
    with raises("rank 1 did not come", "saving step 1 to", path):
        saving.save(1, state(1), force=True)
    _said(rank)


def a_rank_never_decides(rank, world, folder):
    path = f"{folder}/undecided"
    saving = manager(path, timeout=SHORT, save_interval=100)
    saving.should_save(1)
    if rank == 1:
        return _absent(folder, world)
    with raises("rank 1 did not come", "deciding whether to save step", path):
        for step in range(2, 5):
            saving.should_save(step)
    _said(rank)


def a_rank_never_restores(rank, world, folder):
    path = f"{folder}/unrestored"
    saving = manager(path, timeout=SHORT)
    saving.save(0, state(0), force=True)
    if rank == 1:
        return _absent(folder, world)
    with raises("rank 1 did not come", "looking for the newest step of", path):
        saving.restore_latest(state(0))
    _said(rank)


def a_rank_never_opens(rank, world, folder):
    path = f"{folder}/unopened"
    if rank == 1:
        group = xc._dcp.new_group(None, SHORT)  # as far as the others' manager goes without it
        _absent(folder, world)
        return group
    with raises("rank 1 did not come", "opening", path):
        manager(path, timeout=SHORT)
    _said(rank)


def a_rank_never_makes_a_manager(rank, world, folder):
    path = f"{folder}/unmade"
    if rank == 1:
        return _absent(folder, world)
    with raises("rank 1 did not come", "opening", path):
        manager(path, timeout=SHORT)
    _said(rank)


def a_rank_never_begins_an_async_save(rank, world, folder):
    path = f"{folder}/behind"
    saving = manager(path, timeout=SHORT)
    if rank == 1:
        return _absent(folder, world)
    with raises("rank 1 did not come", "beginning an async save to", f"{path}/1"):
        saving.save_async(1, state(1), force=True)
    _said(rank)


def a_rank_never_calls_a_stager(rank, world, folder):
    path = f"{folder}/unstaged"
    if rank == 1:
        return _absent(folder, world)
    with xc.SPMDStager(timeout=SHORT) as stager, raises("rank 1 did not come", "beginning an async save to", path):
        xc.async_save(state(1), path, stager=stager)
    _said(rank)


def a_rank_is_late_and_then_absent(rank, world, folder):
    processes = Processes(None)
    with raises("meeting failed", "all ranks came"), processes.worded("meeting"):
        raise RuntimeError("timed out")
    store = dist.distributed_c10d._get_default_store()
    store.set(f"late{rank}", "1")  # the first failure is over on all ranks before the second one
    store.wait([f"late{one}" for one in range(world)], timedelta(seconds=60))
    if rank == 1:
        return _absent(folder, world)
    with raises("meeting failed", "rank 1 did not come"), processes.worded("meeting"):
        raise RuntimeError("timed out")
    _said(rank)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "scenario",
    [
        *(
            a_rank_is_late_and_then_absent,
            a_rank_never_saves,
            a_rank_never_decides,
            a_rank_never_restores,
            a_rank_never_opens,
        ),
        *(a_rank_never_makes_a_manager, a_rank_never_begins_an_async_save, a_rank_never_calls_a_stager),
    ],
)
def test_missing_rank_is_named_with_the_path_and_the_operation(tmp_path, scenario, world):
    run(scenario, tmp_path, world)

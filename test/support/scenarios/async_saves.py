"""What the hosts of staging/test_processes.py do. Each function runs in every process of a group."""

import datetime
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support import hosts
from support.training import Training, on_host
from torch_xla_ckpt.staging import peers

warnings.filterwarnings("ignore")


def stager_of(rank, world, mode="device", **options):
    return xc.SPMDStager(mode, part_bytes=4096, access=hosts.share_access(rank, world), **options)


def saves_between_barriers(rank, world, folder, mode):
    """Training loops that wait for each other at random, while async saves of several kinds go on.

    Saves and barriers come at the same steps in all processes, delays do not. DCP's own calls are given no process
    group, so they would use the one that the barriers are in.
    """
    together, own = random.Random(11), random.Random(rank)
    training, expected = Training(), {}
    with stager_of(rank, world, mode, max_pending=2) as stager:
        for step in range(40):
            training.step()
            what = together.choice(["xc", "dcp", "save", "barrier", "reduce", "nothing"])
            path = Path(folder) / f"{world}-{mode}-{step if what == 'dcp' else step % 4}"
            threading.Event().wait(own.random() * 0.02)
            if what in ("xc", "dcp", "save"):
                expected[path] = on_host(training.state())
            if what == "xc":
                xc.async_save(training.state(), path, stager=stager)
            elif what == "dcp":
                writer, planner = xc.ShardWriter(path, sync=False), xc.SPMDSavePlanner()
                dcp.async_save(training.state(), storage_writer=writer, planner=planner, async_stager=stager)
            elif what == "save":
                xc.save(training.state(), path, sync=False)
            for _ in range(together.randrange(4)):
                if together.random() < 0.5:
                    dist.barrier()
                else:
                    total = torch.tensor([rank])
                    dist.all_reduce(total)
                    assert total.item() == sum(range(world))
    dist.barrier()
    for path, state in expected.items():
        found = {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for key, v in state.items()}
        dcp.load(found, checkpoint_id=path, no_dist=True)
        for key, value in state.items():
            same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
            assert same, (path, key)


def device_snapshots_between_barriers(rank, world, folder):
    saves_between_barriers(rank, world, folder, "device")


def host_snapshots_between_barriers(rank, world, folder):
    saves_between_barriers(rank, world, folder, "host")


class Broken:
    def state_dict(self):
        raise OSError("the loader's file is gone")

    def load_state_dict(self, state):
        raise AssertionError


def one_cannot_copy(rank, world, folder):
    """The rank that cannot copy its state raises at once; the futures of the other ranks name it, and no rank hangs."""
    for number, bad in enumerate((threading.Lock(), Broken())):
        path = Path(folder) / f"copy{number}"
        with stager_of(rank, world) as stager:
            state = {"t": torch.ones(3), "bad": bad if rank == 1 else 1}
            if rank == 1:
                with pytest.raises((xc.CheckpointError, OSError), match=r"'bad'|the loader's file is gone"):
                    xc.async_save(state, path, stager=stager)
            else:
                handle = xc.async_save(state, path, stager=stager)
                with pytest.raises(xc.CheckpointError, match=r"rank 1: .*('bad'|the loader's file is gone)"):
                    handle.result(60)
            xc.async_save({"t": torch.ones(3)}, path, stager=stager).result(60)


def one_cannot_write(rank, world, folder):
    path = Path(folder) / "write"
    with stager_of(rank, world) as stager:
        writer = xc.ShardWriter(path)
        if rank == world - 1:
            writer.write_data = full
        handle = xc.async_save({"t": torch.ones(3), str(rank): torch.ones(rank)}, storage_writer=writer, stager=stager)
        with pytest.raises(xc.CheckpointError, match=f"rank {world - 1}: OSError: no space left"):
            handle.result(60)
        assert not (path / ".metadata").exists()
        xc.async_save({"t": torch.ones(3)}, path, stager=stager).result(60)


def full(plan, planner):
    raise OSError("no space left on device")


def one_gives_up(rank, world, folder):
    path = Path(folder) / "cancelled"
    stager = stager_of(rank, world)
    writer = xc.ShardWriter(path)
    planned = writer.prepare_local_plan
    cancelled = threading.Event()

    def waiting(plan):
        assert cancelled.wait(60)
        return planned(plan)

    if rank == 0:
        writer.prepare_local_plan = waiting
    handle = xc.async_save({"t": torch.ones(300), "own": torch.ones(2)}, storage_writer=writer, stager=stager)
    if rank == 0:
        closing = threading.Thread(target=lambda: stager.close(cancel=True))
        closing.start()
        while not stager._saves[0].is_cancelled:
            closing.join(0.01)
        cancelled.set()
        closing.join(60)
    with pytest.raises(xc.CheckpointError, match=("rank 0: " if rank else "") + ".*the save was cancelled"):
        handle.result(60)
    stager.close()
    assert not (path / ".metadata").exists()


class Gated(xc.ShardWriter):
    """Storage that waits until ``opened`` is set."""

    def prepare_local_plan(self, plan):
        assert self.opened.wait(60)
        return super().prepare_local_plan(plan)


def one_gives_up_before_its_turn(rank, world, folder):
    for way in ("xc", "dcp"):
        path = Path(folder) / f"turn-{way}"
        with stager_of(rank, world, max_pending=2) as stager:
            gate = Gated(path / "first")
            gate.opened = threading.Event()
            first = xc.async_save({"t": torch.ones(3)}, storage_writer=gate, stager=stager)
            state, writer = {"t": torch.ones(3)}, xc.ShardWriter(path / "second")
            if way == "xc":
                second = xc.async_save(state, storage_writer=writer, stager=stager)
            else:
                planner = xc.SPMDSavePlanner()
                second = dcp.async_save(state, storage_writer=writer, planner=planner, async_stager=stager)
            if rank == 0:
                stager._saves[1].cancel()
            gate.opened.set()
            first.result(60)
            with pytest.raises(xc.CheckpointError, match=("rank 0: " if rank else "") + ".*the save was cancelled"):
                second.upload_completion.result(60)
        assert not (path / "second" / ".metadata").exists()


def a_group_of_some(rank, world, folder):
    """A stager for some of the ranks, while the others do something else."""
    group = dist.new_group([world - 1, 0])
    path = Path(folder) / "some"
    if rank in (0, world - 1):
        with xc.SPMDStager("host", process_group=group) as stager:
            for way in ("xc", "dcp"):
                state = {"t": torch.ones(4), f"own{rank}": torch.full((2,), float(rank))}
                if way == "xc":
                    xc.async_save(state, path / way, stager=stager).result(60)
                else:
                    planner = xc.SPMDSavePlanner()
                    dcp.async_save(
                        state, checkpoint_id=path / way, planner=planner, process_group=group, async_stager=stager
                    ).upload_completion.result(60)
                found = dcp.FileSystemReader(path / way).read_metadata().state_dict_metadata
                assert found.keys() == {"t", "own0", f"own{world - 1}"}


def one_never_begins(rank, world, folder):
    """The error names the path, the rank that never began the save, and what that rank did last."""
    path = Path(folder) / "absent"
    stager = stager_of(rank, world, timeout=datetime.timedelta(seconds=3))
    xc.async_save({"t": torch.ones(3)}, path / "first", stager=stager).result(60)
    if rank != world - 1:
        handle = xc.async_save({"t": torch.ones(3)}, path / "second", stager=stager)
        with pytest.raises(
            xc.CheckpointError,
            match=rf"the save to .*second failed .*: rank {world - 1} has not begun this save \(its last save was to "
            rf".*first\) within timeout=0:00:03",
        ):
            handle.result(60)
    dist.barrier()
    stager.close()


def the_group_is_destroyed_before_the_end(rank, world, folder):
    """The error names the destroyed group and not the timeout. The last scenario, because it leaves no group."""
    path = Path(folder) / "destroyed"
    stager = stager_of(rank, world)
    gate = Gated(path)
    gate.opened = threading.Event()
    handle = xc.async_save({"t": torch.ones(3)}, storage_writer=gate, stager=stager)
    dist.barrier()
    dist.destroy_process_group()
    gate.opened.set()
    with pytest.raises(xc.CheckpointError, match=r"destroyed.*Close the stager or the manager before") as error:
        handle.result(60)
    assert "timeout" not in str(error.value).replace("Timed out", "") and str(path) in str(error.value)
    with pytest.raises(xc.CheckpointError, match="the process group that this stager saves with was destroyed"):
        xc.async_save({"t": torch.ones(3)}, path, stager=stager)
    stager.close()


def one_dies(rank, world, folder):
    """The other ranks name the dead rank within the timeout, and the previous checkpoint is still there."""
    path = Path(folder) / "dies"
    timeout = 20
    stager = stager_of(rank, world, timeout=datetime.timedelta(seconds=timeout))
    xc.async_save({"t": torch.zeros(3)}, path, stager=stager).result(60)
    writer = xc.ShardWriter(path)
    if rank == 1:
        writer.write_data = lambda plan, planner: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    handle = xc.async_save({"t": torch.ones(3)}, storage_writer=writer, stager=stager)
    with pytest.raises(xc.CheckpointError, match=r"failed while the ranks coordinated it: rank 1 is gone"):
        handle.result(120)
    assert time.monotonic() - start < timeout + 20  # and the roll call
    with pytest.MonkeyPatch.context() as patched:  # a new group would wait for the dead rank once more
        patched.setattr(peers, "Peers", None)
        for _ in range(2):
            with pytest.raises(xc.CheckpointError, match=r"beginning an async save to .* failed: rank 1 is gone"):
                xc.async_save({"t": torch.ones(3)}, path, stager=stager)
    stager.close()
    found = {"t": torch.ones(3)}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    assert not found["t"].any()
    os._exit(0)  # leaving a group with a dead rank would hang


def async_saves_without_a_stager(rank, world, folder):
    """The processes' own stagers save together, and an error of one rank is raised on all ranks."""
    path = Path(folder) / "own"
    for number in range(2):
        xc.async_save({"t": torch.full((3,), number), f"own{rank}": rank}, path).result(60)
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert found.keys() == {"t", *(f"own{n}" for n in range(world))}
    writer = xc.ShardWriter(path)
    if rank == 1:
        writer.write_data = full
    xc.async_save({"t": torch.ones(3)}, storage_writer=writer)
    with pytest.raises(xc.CheckpointError, match=r"an earlier async save failed: .*rank 1: OSError: no space left"):
        xc.async_save({"t": torch.ones(3)}, path)
    found = {"t": torch.zeros(3)}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    assert found["t"].eq(1).all()  # of the second save

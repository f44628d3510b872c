"""Checkpoint folders that somebody removes, moves or copies during a save, and four ranks that save into one bucket."""

import shutil
import threading

import pytest
import torch

import torch_xla_ckpt as xc
from support.s3 import Saving, Server, host_state

OLD, NEW = 1.0, 2.0


def state(value):
    return {f"t{n}": torch.full((1000,), value) for n in range(8)} | {"value": value}


def value_of(path):
    """The one value that all tensors of a checkpoint have."""
    found = state(0.0)
    xc.load(found, path)
    values = {float(v) for key, tensor in found.items() if key != "value" for v in tensor.unique()} | {found["value"]}
    assert len(values) == 1, f"parts of two checkpoints: {values}"
    return values.pop()


class InterruptedWriter(xc.ShardWriter):
    """A writer that calls ``interrupt`` at a point of its save: "planned" or "written"."""

    def __init__(self, path, point, interrupt):
        super().__init__(path, sync=False)
        self.point, self.interrupt = point, interrupt

    def prepare_global_plan(self, plans):
        found = super().prepare_global_plan(plans)
        self._reached("planned")
        return found

    def write_data(self, plan, planner):
        done = super().write_data(plan, planner)
        self._reached("written")
        return done

    def _reached(self, point):
        if point == self.point:
            self.interrupt()


@pytest.mark.parametrize("point", ["planned", "written"])
@pytest.mark.parametrize("how", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
def test_a_save_fails_if_its_folder_is_removed_or_moved_and_the_next_save_works(tmp_path, point, how):
    path = tmp_path / "c"
    xc.save(state(OLD), path)
    with pytest.raises(xc.CheckpointError):
        xc.save(state(NEW), storage_writer=InterruptedWriter(path, point, lambda: how(path)))
    if (tmp_path / "moved").exists():
        assert value_of(tmp_path / "moved") == OLD
    xc.save(state(NEW), path)
    assert value_of(path) == NEW


@pytest.mark.parametrize("point", ["planned", "written"])
@pytest.mark.parametrize("old", [False, True])
def test_a_copy_made_during_a_save_holds_the_old_checkpoint_or_none(tmp_path, point, old):
    path, copy = tmp_path / "c", tmp_path / "copy"
    if old:
        xc.save(state(OLD), path)
    xc.save(state(NEW), storage_writer=InterruptedWriter(path, point, lambda: shutil.copytree(path, copy)))
    if old:
        assert value_of(copy) == OLD and xc.verify(copy).ok
    else:
        with pytest.raises(xc.CheckpointError, match="there is no checkpoint"):
            value_of(copy)
    xc.save(state(3.0), copy)
    assert value_of(copy) == 3.0


@pytest.mark.slow
def test_a_copy_made_while_saves_replace_each_other_is_whole_or_reported_as_damaged(tmp_path):
    """Files are copied one by one. A copy with files of two checkpoints must not load as if it were whole."""
    path = tmp_path / "c"
    xc.save(state(0.5), path)
    ended = threading.Event()

    def save_again_and_again():
        for number in range(60):
            xc.save(state(float(number + 1)), path, sync=False)
        ended.set()

    saving = threading.Thread(target=save_again_and_again)
    saving.start()
    seen = {"whole": 0, "damaged": 0}
    while not ended.is_set():
        copy = tmp_path / f"copy{sum(seen.values())}"
        copy.mkdir()
        for file in sorted(path.iterdir()):
            try:
                shutil.copy(file, copy)
            except FileNotFoundError:
                continue
        try:
            value_of(copy)
            seen["whole"] += 1
        except xc.CheckpointError:
            seen["damaged"] += 1
    saving.join()
    assert sum(seen.values()) > 0 and value_of(path) == 60.0


def test_a_folder_with_a_link_to_itself_is_usable(tmp_path):
    path, run = tmp_path / "c", tmp_path / "run"
    xc.save(state(OLD), path)
    (path / "self").symlink_to("self")
    xc.save(state(NEW), path)
    assert value_of(path) == NEW and xc.verify(path).ok
    with xc.CheckpointManager(run, save_interval=1) as manager:
        manager.save(1, state(OLD))
    (run / "notes").symlink_to("notes")
    with xc.CheckpointManager(run, save_interval=1) as manager:
        manager.save(2, state(NEW))
        assert manager.all_steps() == [1, 2]


@pytest.mark.slow
def test_four_ranks_save_into_one_bucket(tmp_path):
    with Server() as server, server.bucket("four-ranks") as bucket:
        url = "s3://four-ranks/run/c"
        for attempt, seed in enumerate((0, 20)):
            rendezvous = str(tmp_path / f"rendezvous{attempt}")
            assert Saving(url, server.options, seed, world=4, rendezvous=rendezvous).said(120) == [""] * 4
        saved = {f"rank{rank}.{key}": value for rank in range(4) for key, value in host_state(20 + rank).items()}
        found = {key: torch.zeros_like(value) for key, value in saved.items()}
        xc.load(found, storage_reader=xc.ShardReader(url, storage_options=server.options))
        assert all(torch.equal(found[key], value) for key, value in saved.items())
        assert not [key for key in bucket.objects() if "lease" in key]

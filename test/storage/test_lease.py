"""Leases tell which saves may be alive, so that only files of dead saves are removed."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

import torch_xla_ckpt as xc
from support.stepwise_saves import steps_of, value_at
from torch_xla_ckpt.storage import file_names, lease
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import Location


def holder(**changes):
    fields = json.loads(lease.Holder.here().to_bytes())
    return lease.Holder(**{**fields, **changes})


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return process.pid


def test_a_lease_knows_a_process_that_has_ended_on_this_machine():
    assert lease.Holder.here().is_alive() is True
    assert holder(pid=ended_process()).is_alive() is False
    assert holder(started="1").is_alive() is False, "another process has got the same number since"
    assert holder(boot="another boot").is_alive() is None
    assert holder(space="pid:[1]").is_alive() is None, "another container's process numbers"


def leave(folder, owner, age=0.0):
    """Leave the files of a save that broke off, with a lease."""
    folder.mkdir(exist_ok=True)
    save_id = file_names.new_save_id()
    for name in (file_names.data_name(0, 0, save_id), lease.lease_name(save_id)):
        (folder / name).write_bytes(owner.to_bytes())
        os.utime(folder / name, (os.stat(folder / name).st_mtime - age,) * 2)
    return save_id


@pytest.mark.parametrize(
    "owner, age, goes",
    [
        ({"pid": "ended"}, 0, True),
        ({"boot": "elsewhere"}, 0, False),
        ({"boot": "elsewhere"}, lease.EXPIRY + 60, True),
        ({}, 0, True),  # of this very process, which has no such save under way
    ],
)
def test_files_of_a_save_that_may_be_alive_stay(tmp_path, owner, age, goes):
    owner = {**owner, "pid": ended_process()} if "pid" in owner else owner
    save_id = leave(tmp_path / "c", holder(**owner), age)
    xc.save({"t": torch.ones(3)}, tmp_path / "c")
    left = [name for name in os.listdir(tmp_path / "c") if save_id in name]
    assert bool(left) is not goes, left


def test_a_lease_that_could_not_be_renewed_fails_its_save(tmp_path, monkeypatch):
    """Another program may have taken it for dead: a machine that slept, or a store that did not answer."""
    xc.save({"t": torch.zeros(100)}, tmp_path / "c")
    save = steps_of(tmp_path / "c", None, 1.0)
    for _ in range(3):
        next(save)
    now = lease._clock()
    monkeypatch.setattr(lease, "_clock", lambda: now + lease.EXPIRY)
    with pytest.raises(xc.CheckpointError, match="lease was not renewed"):
        next(save)
    monkeypatch.undo()
    assert value_at(tmp_path / "c", None) == 0.0


def test_a_lease_is_renewed_while_a_save_lasts(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEWAL", 0.01)
    folder = open_folder(Location.of(tmp_path))
    renewed = threading.Event()
    put = folder.put
    monkeypatch.setattr(folder, "put", lambda *args: (put(*args), renewed.set()))
    held = lease.Lease(folder, file_names.new_save_id())
    renewed.clear()
    assert renewed.wait(60)
    held.end()

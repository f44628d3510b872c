"""Forked children find no lock of the package held, and admit no types that a load of their parent admitted."""

import importlib
import os
import pkgutil
import signal
import threading

import pytest
import torch

import torch_xla_ckpt as xc

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore"),
]


def locks():
    """The locks of all modules and classes of the package: (owner, name, lock)."""
    kinds = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
    for found in pkgutil.walk_packages(xc.__path__, "torch_xla_ckpt."):
        if found.name.startswith("torch_xla_ckpt.device.xla") or "integrations" in found.name:
            continue
        module = importlib.import_module(found.name)
        owners = [
            module,
            *(one for one in vars(module).values() if isinstance(one, type) and "torch_xla_ckpt" in one.__module__),
        ]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                for lock in (value, getattr(value, "lock", None)):
                    if isinstance(lock, kinds):
                        yield owner, name, lock


def in_child(function):
    """Call a function in a forked child; returns the exit code: 0, or 1 if it raised, or 9 if it hangs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(60)
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_no_lock_of_the_package_is_held_in_a_child(tmp_path):
    found = list(locks())
    assert len({id(lock) for _, _, lock in found}) >= 4
    held, done = threading.Event(), threading.Event()

    def hold():
        taken = [lock for _, _, lock in found if lock.acquire(blocking=False)]  # some are found twice
        held.set()
        done.wait()
        for lock in taken:
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()

    def free():
        for owner, name, _ in locks():
            value = vars(owner)[name]
            lock = value if hasattr(value, "acquire") else value.lock
            assert lock.acquire(timeout=5), f"{owner}.{name} is held by nobody"
            lock.release()
        xc.save({"t": torch.ones(3), "n": {1}}, tmp_path / "c")
        xc.load({"t": torch.zeros(3), "n": None}, tmp_path / "c")

    try:
        assert in_child(free) == 0
    finally:
        done.set()
        holder.join()


class Slow:
    """An object that takes its time to be loaded."""

    began, go_on = threading.Event(), threading.Event()

    def __init__(self):
        self.value = 1

    def __setstate__(self, state):
        self.began.set()
        assert self.go_on.wait(60)


def test_a_child_forked_while_an_object_is_loaded_admits_no_more_types_than_before(tmp_path):
    xc.save({"x": Slow(), "n": {1}}, tmp_path / "c")
    target = {"x": None}
    loading = threading.Thread(
        target=xc.load, args=(target, tmp_path / "c"), kwargs={"allow_types": [Slow], "unexpected": "ignore"}
    )
    before = set(torch.serialization.get_safe_globals())
    loading.start()
    assert Slow.began.wait(60)

    def child():
        assert set(torch.serialization.get_safe_globals()) == before
        with pytest.raises(xc.UnsafeObjectError):
            xc.load({"x": None}, tmp_path / "c", unexpected="ignore")
        other = {"n": None}
        xc.load(other, tmp_path / "c", unexpected="ignore")
        assert other["n"] == {1}

    try:
        assert in_child(child) == 0
    finally:
        Slow.go_on.set()
        loading.join()
    assert isinstance(target["x"], Slow) and set(torch.serialization.get_safe_globals()) == before

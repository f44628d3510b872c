"""Children are bystanders: forked at any stage of a save, they exit, end on SIGTERM, and leave the save alone."""

import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_xla_ckpt as xc
from support.fork_server import ForkServer
from support.paths import environment

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore"),
]


ENVIRONMENT = environment(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")


def forked_at(stage, mode, folder):
    command = [sys.executable, "-m", "support.forking_program", stage, mode, str(folder)]
    program = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280)
    assert program.returncode == 0, program.stderr[-5000:]
    said = json.loads(program.stdout.splitlines()[-1])
    assert not said["problems"], "\n".join(said["problems"]) + program.stderr[-5000:]
    return said["made"]


@pytest.mark.parametrize(
    "stage",
    [
        *("before", "copying", "waiting for a slot", "planning", "writing", "committing", "cleaning up", "committed"),
        *("writing, in its thread", "committing, in its thread"),
    ],
)
def test_children_made_at_any_stage_of_an_async_save_exit_and_leave_it_alone(tmp_path, stage):
    assert forked_at(stage, "host", tmp_path)


def test_children_made_while_devices_are_saved_exit_and_leave_the_save_alone(tmp_path):
    pytest.importorskip("torch_xla")
    assert forked_at("writing", "device", tmp_path)


@pytest.mark.parametrize("stage", ["a save writes", "a save fetches"])
def test_a_child_forked_inside_a_save_that_exits_removes_none_of_its_files(tmp_path, stage):
    assert "left_by_sys_exit" in forked_at(stage, "host", tmp_path)


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


# Handlers


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    yield server
    server.close()


VERBS = ["listen", "listen", "close", "drop", "replace", "put back"]


@settings(max_examples=100)
@given(operations=st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 5)), max_size=12))
def test_listeners_that_end_in_any_order_leave_sigterm_as_it_would_be_without_them(fork_server, operations):
    result, _ = fork_server.call("support.forking_program.chain", operations)
    without = next((said for verb, said in result["said"] if verb == "without"), None)
    assert without is not None, result
    after = result["said"][result["said"].index(["without", without]) + 1 :]
    assert after == without and result["exit"] == -signal.SIGTERM, result


MANAGERS = """
import gc, os, signal, sys
import torch_xla_ckpt as xc

order, folder = sys.argv[1:]
managers = [xc.CheckpointManager(f"{folder}/{n}") for n in range(3)]
assert callable(signal.getsignal(signal.SIGTERM))
os.kill(os.getpid(), signal.SIGTERM)
assert all(manager.reached_preemption(1) for manager in managers)
gc.collect()
gc.disable()  # a dropped manager goes at once
for n, verb in zip(map(int, order), ["close", sys.argv[1][3:] or "close", "close"]):
    if verb == "close":
        managers[n].close()
    managers[n] = None
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.getsignal(signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("order", ["012", "210", "102", "012drop", "201drop"])
def test_managers_closed_or_dropped_in_any_order_let_sigterm_end_the_program(tmp_path, order):
    program = subprocess.run(
        [sys.executable, "-c", MANAGERS.replace("map(int, order)", "map(int, order[:3])"), order, str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert program.returncode == -signal.SIGTERM, program.stderr


CLOSED_ELSEWHERE = """
import os, signal, sys, threading
import torch_xla_ckpt as xc

manager = xc.CheckpointManager(sys.argv[1])
closing = threading.Thread(target=manager.close)
closing.start()
closing.join()
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_manager_closed_in_another_thread_lets_sigterm_end_the_program(tmp_path):
    """Only the main thread can put a handler back; until it does, the handler must do what the one before would."""
    command = [sys.executable, "-c", CLOSED_ELSEWHERE, str(tmp_path)]
    program = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert program.returncode == -signal.SIGTERM, program.stderr

"""Managers that listen for SIGTERM restore its handling when they are closed or dropped."""

import os
import signal
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_xla_ckpt as xc
from support import interpreters
from support.fork_server import ForkServer
from support.runs import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    yield server
    server.close()


VERBS = ["listen", "listen", "close", "drop", "replace", "put back"]


@settings(max_examples=40)
@given(operations=st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 5)), max_size=12))
def test_listeners_closed_in_any_order_leave_sigterm_as_without_them(fork_server, operations):
    result, _ = fork_server.call("support.sigterm_handlers.chain", operations)
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
def test_sigterm_ends_the_program_after_managers_were_closed_or_dropped_in_any_order(tmp_path, order):
    source = MANAGERS.replace("map(int, order)", "map(int, order[:3])")
    program = interpreters.run(["-c", source, order, tmp_path])
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


def test_sigterm_ends_the_program_after_a_manager_was_closed_in_another_thread(tmp_path):
    """Only the main thread can put a handler back. Until then ours must act like the handler before it."""
    program = interpreters.run(["-c", CLOSED_ELSEWHERE, tmp_path])
    assert program.returncode == -signal.SIGTERM, program.stderr


def test_sigterm_saves_one_step_and_calls_the_handler_installed_before(tmp_path):
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    try:
        handler = signal.getsignal(signal.SIGTERM)
        manager = xc.CheckpointManager(tmp_path, 1000)
        assert not manager.save_async(1, state(1)) and not manager.reached_preemption(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save_async(2, state(2)) and manager.reached_preemption(2) and called == [1]
        assert not manager.save_async(3, state(3)) and manager.reached_preemption(3)  # once
        manager.close()
        assert manager.all_steps() == [2] and signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_chkpt_on_preemption_false_leaves_the_sigterm_handler_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with xc.CheckpointManager(tmp_path, 1, chkpt_on_preemption=False):
        assert signal.getsignal(signal.SIGTERM) is before


def test_manager_created_outside_the_main_thread_warns_that_sigterm_is_not_noticed(tmp_path, caplog):
    made = []
    thread = threading.Thread(target=lambda: made.append(xc.CheckpointManager(tmp_path, 1)))
    thread.start()
    thread.join()
    assert "SIGTERM is not noticed" in caplog.text
    made[0].save(0, state(0))
    made[0].close()

"""Managers that listen for SIGTERM leave it, when they end, as it would be without them."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fork_server import ForkServer
from support.paths import environment

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore"),
]

ENVIRONMENT = environment(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory):
    server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    yield server
    server.close()


VERBS = ["listen", "listen", "close", "drop", "replace", "put back"]


@settings(max_examples=100)
@given(operations=st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 5)), max_size=12))
def test_listeners_that_end_in_any_order_leave_sigterm_as_it_would_be_without_them(fork_server, operations):
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

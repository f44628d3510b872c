"""Copies on the devices are exact in programs that XLA has optimised, as it does for users."""

import subprocess
import sys

import pytest

from support.paths import ROOT, environment

pytestmark = pytest.mark.slow

EXACT = ["staging/test_snapshot_memory.py::test_every_dtype_is_exact_in_a_copy_that_overwrites_another"]


def test_exact_copies_with_the_optimisation_that_users_have():
    """The other tests compile without LLVM's optimisation (``support.devices``), which might hide a change of bits."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"test/{test}" for test in EXACT)]
    env = environment(XLA_FLAGS="", PYTEST_ADDOPTS="")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=250)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr

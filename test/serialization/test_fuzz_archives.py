"""No item, however it was put together, crashes a load, makes it hang, or has it do anything but return plain data."""

import subprocess
import sys

import pytest

from support.paths import environment

pytestmark = pytest.mark.slow


def test_mutated_items_are_refused_or_load_as_harmless_types():
    command = [sys.executable, "-m", "support.archive_fuzzer", "--cases", "5000", "--seed", "20"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5000 cases" in done.stdout and " 0 failed" in done.stdout

"""Groups of ranks, which this package makes from private functions of torch.distributed."""

import sys

import pytest

from support import interpreters
from support.paths import ROOT, TEST, newer_python

pytestmark = pytest.mark.slow


def run(scenario, folder, python):
    done = interpreters.run(
        [TEST / "support" / "without_xla" / "groups.py", scenario, folder],
        env={"PYTHONPATH": str(ROOT)},
        modules=interpreters.STOCK,
        python=python,
        cwd=folder,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rank_may_be_in_more_groups_than_another_one(tmp_path):
    run("uneven", tmp_path, newer_python())  # test_several_processes.py has it for this torch


@pytest.mark.parametrize("python", [lambda: sys.executable, newer_python], ids=["this torch", "newer torch"])
def test_a_rank_may_be_replaced_by_another_process(tmp_path, python):
    run("restarted", tmp_path, python())

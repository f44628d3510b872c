"""Groups of ranks, made from private functions of torch.distributed, on the newest torch without torch_xla."""

import pytest

from support import interpreters
from support.paths import ROOT, TEST, newer_python

pytestmark = pytest.mark.slow


def test_a_rank_may_be_in_more_groups_than_another_one(tmp_path):
    done = interpreters.run(
        [TEST / "support" / "without_xla" / "groups.py", tmp_path],
        env={"PYTHONPATH": str(ROOT)},
        modules=interpreters.STOCK,
        python=newer_python(),
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr

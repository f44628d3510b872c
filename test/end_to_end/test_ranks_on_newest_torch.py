"""Async saves of several ranks on the newest torch, without torch_xla: ``dcp.async_save`` is steered from inside."""

import pytest

from support import interpreters
from support.paths import ROOT, TEST, newer_python

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", ["xc", "dcp"])
def test_a_rank_that_cannot_copy_its_state_changes_no_other_save(tmp_path, way):
    done = interpreters.run(
        [TEST / "support" / "without_xla" / "async_ranks.py", tmp_path, way],
        env={"PYTHONPATH": str(ROOT)},
        modules=interpreters.STOCK,
        python=newer_python(),
        cwd=tmp_path,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr

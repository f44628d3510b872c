"""CheckpointManager on several ranks with XLA devices: same decisions, and errors that reach all ranks."""

import pytest

from support import hosts


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_make_the_same_decisions(tmp_path, world):
    for said in hosts.run(world, "all_scenarios", tmp_path):
        assert said.count(" passed") == 7, said

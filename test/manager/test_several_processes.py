"""CheckpointManager with several processes: they decide alike, and hear of each other's misfortunes."""

import pytest

from support import hosts


@pytest.mark.parametrize("world", [2, 4])
def test_processes_agree(tmp_path, world):
    for said in hosts.run(world, "all_scenarios", tmp_path):
        assert said.count(" passed") == 7, said

"""CheckpointManager with several ranks: they decide alike, and every rank learns of another rank's failure."""

import pytest

from support import hosts

pytestmark = pytest.mark.slow

SCENARIOS = [
    "steps_and_decisions_agree",
    "all_ranks_are_idle_at_the_same_steps",
    "a_damaged_step_is_skipped_by_all",
    "folders_of_their_own",
    "a_folder_that_rank_0_cannot_write",
    "one_is_told_to_end",
    "random_generators_are_each_processes_own",
    "what_fails_on_one_is_raised_on_all",
    "what_one_cannot_copy_does_not_hold_up_the_others",
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_several_ranks(tmp_path, scenario, world):
    hosts.run(world, scenario, tmp_path)


def test_on_ranks_that_are_in_different_numbers_of_groups(tmp_path):
    hosts.run(3, "groups_of_which_one_rank_has_more", tmp_path)

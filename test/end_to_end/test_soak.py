"""Training is killed and restarted on other meshes, and nobody can tell from the results."""

from collections import Counter

import pytest

from support.s3 import Server
from support.soak import Chain

pytestmark = pytest.mark.slow

SEED = 9  # this chain meets every kind of end, on three meshes; scripts/soak makes chains as long as one has time for
RESTARTS = 6


@pytest.mark.timeout(900)
def test_killed_at_random_moments_a_run_goes_on_as_if_nothing_had_happened(tmp_path):
    found = Chain(tmp_path / "run", tmp_path, SEED).run(RESTARTS)
    blows = Counter(found["blows"])
    assert sum(blows.values()) == RESTARTS and len(blows) == 4, blows
    assert found["last"] > 0, found


@pytest.mark.timeout(300)
def test_the_same_over_an_object_store(tmp_path):
    with Server() as server, server.bucket("soak") as bucket:
        chain = Chain(f"s3://{bucket.name}/run", tmp_path, 6, {"storage_options": server.options})
        found = chain.run(4)
    assert len(found["blows"]) == 4 and found["last"] > 0

"""Training is killed and restarted on other meshes, and nobody can tell from the results."""

import concurrent.futures
from collections import Counter

import pytest

from support.s3 import Server
from support.soak import Chain

pytestmark = pytest.mark.slow

SEEDS = (21, 25)  # their chains meet every kind of end; scripts/soak makes as many chains as one has time for
RESTARTS = 5  # of each chain


@pytest.mark.timeout(900)
def test_killed_at_random_moments_a_run_goes_on_as_if_nothing_had_happened(tmp_path):
    def chain(seed):
        notes = tmp_path / f"notes{seed}"
        notes.mkdir()
        return Chain(tmp_path / f"run{seed}", notes, seed).run(RESTARTS)

    with concurrent.futures.ThreadPoolExecutor(len(SEEDS)) as pool:
        results = list(pool.map(chain, SEEDS))
    blows = Counter(blow for result in results for blow in result["blows"])
    assert sum(blows.values()) == RESTARTS * len(SEEDS) and len(blows) == 4, blows
    assert all(result["last"] > 0 for result in results), results


@pytest.mark.timeout(300)
def test_the_same_over_an_object_store(tmp_path):
    with Server() as server, server.bucket("soak") as bucket:
        chain = Chain(f"s3://{bucket.name}/run", tmp_path, 6, {"storage_options": server.options})
        found = chain.run(4)
    assert len(found["blows"]) == 4 and found["last"] > 0

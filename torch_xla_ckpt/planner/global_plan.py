"""The coordinator's plan of a save, which is used again while the ranks' offers stay the same.

Who writes what follows from the offers and from nothing else. So a plan is found again by a digest of all offers: keys,
paths, dtypes, shapes, flags, shardings and boxes of every rank, and which values differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.planner.offers import Gathered, SentPlan, digest_of, divergent_numbers
from torch_xla_ckpt.planner.owners import Owners, prove_complete

_MOST = 2  # plans that are kept: a program may save two kinds of states in turn


@dataclass(frozen=True)
class GlobalPlan:
    """A plan of a save, proven to write every element once. It never changes.

    Args:
        digest: the digest of the offers that it was made from.
        ids: for each rank, the position of each of its values in the catalog.
        divergent_numbers: the values whose data differs between ranks, as positions in the catalog.
        catalog: everything that is written.
        items: the items of each rank.
    """

    digest: bytes
    ids: Sequence[Integers]
    divergent_numbers: frozenset[int]
    catalog: _dcp.Catalog
    items: Sequence[_dcp.AssignedItems]

    @property
    def divergent(self) -> list[str]:
        """The keys whose data differs between ranks, sorted."""
        return sorted(self.catalog.entries[number].key for number in self.divergent_numbers)


_kept: list[GlobalPlan] = []


def global_plan(plans: Sequence[SavePlan]) -> GlobalPlan:
    """Return the plan for the ranks' offers. Equal offers give one plan, which is made and proven once.

    Args:
        plans: each rank's local plan.

    Raises:
        CheckpointError: two ranks offer different kinds, shapes or dtypes for one key.
        IncompleteCheckpointError: the ranks together do not hold every element of a tensor exactly once.
    """
    sent = [SentPlan.of(plan) for plan in plans]
    digest = digest_of(sent)
    for known in list(_kept):
        if known.digest == digest and known.divergent_numbers == divergent_numbers(known.ids, sent):
            _keep(known)
            return known
    gathered = Gathered(sent)
    divergent = divergent_numbers(gathered.ids, sent)
    owners = Owners(gathered, divergent)
    prove_complete(owners.catalog.metadata().state_dict_metadata)
    plan = GlobalPlan(digest, gathered.ids, divergent, owners.catalog, owners.items())
    _keep(plan)
    return plan


def _keep(plan: GlobalPlan) -> None:
    """Keep a plan as the newest one, and drop the oldest if there are too many."""
    _kept[:] = [plan, *(one for one in _kept if one is not plan)][:_MOST]

"""SPMDSavePlanner: DCP's interface for saving sharded tensors."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.device import access_of
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.planner.global_plan import global_plan
from torch_xla_ckpt.planner.held import held_items, hold_items
from torch_xla_ckpt.planner.offers import LocalFacts, as_sent, entry_of, offers_of
from torch_xla_ckpt.protocols import SaveSource, TensorAccess
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.serialization import MAX_DEPTH, Encoded, Item, decode, encode
from torch_xla_ckpt.state import (
    Leaf,
    ShardSource,
    TensorHandle,
    compact,
    digest,
    flatten,
    gathered,
    lay_out,
    require_savable,
)

logger = logging.getLogger(__name__)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMED = 20  # keys that one warning names


class SPMDSavePlanner(SavePlanner, SaveSource):
    """Saves state dicts that hold XLA tensors sharded by SPMD, and everything else that DCP saves.

    Pass it to ``dcp.save``. Each rank offers every distinct box that it holds. The coordinator balances bytes: it gives
    each box, or parts of it, to one of the box's holders. It proves that the boxes of every tensor cover the tensor
    exactly once. The result is a standard DCP checkpoint.

    Several ranks may each write a part of a tensor that SPMD replicates. The same holds for a host tensor, if its data
    is equal on all ranks. If its data differs, the lowest rank's is saved, and a warning names the key. Objects are
    saved from the lowest rank that has them, with the same warning if they differ. ``PerRank`` saves the value of
    every rank.

    Args:
        access: returns the access that reads a tensor. The default suits every tensor; simulated hosts pass their own.

    Raises (inside DCP's ``CheckpointException``, as every error of a planner; ``torch_xla_ckpt.save`` unwraps it):
        IncompleteCheckpointError: the ranks together do not hold every element of a tensor exactly once.
        CheckpointError: two values have one key, or ranks disagree about a key's shape or dtype.
    """

    def __init__(self, *, access: Callable[[torch.Tensor], TensorAccess] = access_of):
        self._access_of = access
        self._leaves: dict[str, Leaf] = {}
        self._entries: list[_dcp.Entry] = []
        self._offers = b""  # the digest of this rank's offers
        self._held: _dcp.SentItems | None = None  # what this rank was told to write of the same offers before
        self._tensors: dict[str, TensorHandle] = {}
        self._source = ShardSource({})
        self._encoded: dict[str, Item] = {}  # objects that were encoded to be compared between ranks
        self._needs: dict[str, frozenset[str]] = {}
        self._unresolved = 0
        self._lock = threading.Lock()

    @without_collector
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._leaves = flatten(state_dict, with_empty=True, deepest=MAX_DEPTH)
        tensors = {key: leaf.value for key, leaf in self._leaves.items() if leaf.is_tensor}
        for leaf in self._leaves.values():
            if isinstance(leaf.value, Encoded):
                leaf.value.check()
        require_savable(tensors)
        self._tensors = lay_out(tensors, self._access_of)
        self._encoded = {}
        self._source = ShardSource(self._tensors)

    @without_collector
    def create_local_plan(self) -> SavePlan:
        self._entries = [entry_of(key, leaf, self._tensors.get(key)) for key, leaf in self._leaves.items()]
        offers = offers_of(self._entries, self._tensors)
        self._offers = offers.packed.digest
        self._held = held_items(self._offers)
        held = b"" if self._held is None else self._held.digest
        facts = LocalFacts.of(self._entries, self._digests(), offers.packed.names, held)
        return SavePlan(offers, planner_data=facts)  # type: ignore[arg-type]

    @without_collector
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plan = global_plan(all_plans)
        if plan.divergent:
            logger.warning(
                "these tensors and objects differ between ranks, and the value of the lowest rank is saved: %s. To "
                "save the value of every rank, wrap it in torch_xla_ckpt.PerRank, or put the rank in the key",
                ", ".join(plan.divergent),
            )
        plans = [
            replace(local, items=as_sent(own, local), planner_data=None)  # type: ignore[arg-type]
            for local, own in zip(all_plans, plan.items)
        ]
        return plans, plan.catalog.metadata()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        items: Any = new_plan.items
        if isinstance(items, _dcp.HeldItems):
            if self._held is None or self._held.digest != items.digest:
                raise CheckpointError(
                    "the coordinator refers to items that this rank does not have. Nothing was committed. Use the "
                    "planner that made the local plan to finish the plan of the same save"
                )
            items = self._held
        if isinstance(items, _dcp.SentItems):
            hold_items(self._offers, items)
            new_plan = replace(new_plan, items=items.items(self._entries))  # type: ignore[arg-type]
        written = {item.index.fqn for item in new_plan.items if item.tensor_data is None}
        self._encoded = {key: data for key, data in self._encoded.items() if key in written}
        tensors = (item for item in new_plan.items if item.tensor_data is not None)
        self._source.announce((item.index.fqn, _box(item)) for item in tensors)
        self._needs, self._unresolved = {}, len(new_plan.items)
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.tensor_data is not None:
            shard = self._source.take(key, _box(write_item))
            self._note_needs(key, frozenset() if type(shard) in _PLAIN else _types_to_allow(shard))
            return shard
        item = self._encoded.pop(key, None) or self._encode(key)
        self._note_needs(key, item.needs)
        return item

    def part(self, item: WriteItem) -> int:
        return self._source.part(item.index.fqn, _box(item))

    def host_bytes(self, key: str, part: int) -> int:
        held = self._tensors[key]
        return held.access.host_bytes(held.tensor, held.layout, part)

    def sharding(self, key: str) -> str:
        return self._tensors[key].layout.sharding

    def _note_needs(self, key: str, needs: frozenset[str]) -> None:
        """Note the types that a load of ``key`` must be told to allow. After the last item, warn once."""
        with self._lock:
            if needs:
                self._needs[key] = needs
            self._unresolved -= 1
            if not self._unresolved and self._needs:
                _warn_of_needs(self._needs)

    def _encode(self, key: str) -> Item:
        value = self._leaves[key].value
        return value.open() if isinstance(value, Encoded) else encode(key, value, self._gather)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return gathered(tensor, self._access_of)

    def _digests(self) -> dict[str, bytes]:
        """Return digests of all values that other ranks may hold with other data; none if there is one rank."""
        if Processes(None).size == 1:
            return {}
        tensors = {key: held for key, held in self._tensors.items() if not held.layout.identical}
        objects = {key: leaf.value for key, leaf in self._leaves.items() if key not in self._tensors}
        return {
            **{key: _digest(held.gather()) for key, held in tensors.items()},
            **{key: self._digest_of_object(key, value) for key, value in objects.items()},
        }

    def _digest_of_object(self, key: str, value: Any) -> bytes:
        if isinstance(value, Encoded):
            data = value.open()
            try:
                value = decode(key, data, (), trust_pickle=False)  # equal objects can be pickled in several ways
            except CheckpointError:
                return xxhash.xxh3_128_digest(data.getvalue())

        def pickled() -> bytes:
            self._encoded[key] = self._encode(key)
            return self._encoded[key].getvalue()

        return digest(value, pickled)


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return _dcp.box_of(item.tensor_data.chunk)


def _digest(tensor: torch.Tensor) -> bytes:
    flat = compact(tensor).reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_digest(flat.numpy().data)


def _types_to_allow(tensor: torch.Tensor) -> frozenset[str]:
    """Return the name of a tensor's class, if a load must be told to allow it."""
    cls = type(tensor)
    known = cls in torch.serialization.get_safe_globals()
    return frozenset() if known else frozenset({f"{cls.__module__}.{cls.__qualname__}"})


def _warn_of_needs(needs: Mapping[str, frozenset[str]]) -> None:
    named = [f"{key!r} ({', '.join(sorted(names))})" for key, names in sorted(needs.items())]
    logger.warning(
        "a load will refuse these items unless it is told to admit their types: %s%s. Load them with "
        "allow_types=[...] (for tensors of a subclass: torch.serialization.add_safe_globals), or save plain data "
        "instead. A nested Stateful is saved as an object unless the state dict holds its state_dict()",
        ", ".join(named[:_NAMED]),
        f" and {len(named) - _NAMED} more" if len(named) > _NAMED else "",
    )

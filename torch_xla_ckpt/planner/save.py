"""SPMDSavePlanner: what each process writes."""

from __future__ import annotations

import io
import itertools
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.device import access_of
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.layout import Box, Claim, assign
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.serialization import MAX_DEPTH, Encoded, Item, decode, encode
from torch_xla_ckpt.state import (
    Leaf,
    Path,
    ShardSource,
    TensorHandle,
    compact,
    digest,
    flatten,
    lay_out,
    require_savable,
)

logger = logging.getLogger(__name__)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Keys that one warning names.
_NAMED = 20


@dataclass(frozen=True)
class LocalFacts:
    """What a process tells the coordinator beside its items.

    Args:
        paths: DCP's mapping from each key to its path in the state dict.
        digests: for tensors and objects that are not known to be equal on all processes, a digest of their data.
        integers: positions in a key's path of what are integer keys of mappings. They go apart, because an
            ``IntegerKey`` arrives as a string.
    """

    paths: Mapping[str, Path]
    digests: Mapping[str, bytes] = field(default_factory=dict)
    integers: Mapping[str, Sequence[int]] = field(default_factory=dict)


class SPMDSavePlanner(SavePlanner):
    """Saves state dicts that hold XLA tensors sharded by SPMD, beside anything else DCP saves.

    Pass it to ``dcp.save``. Each process offers every distinct box it holds; the coordinator gives each box, or
    parts of it, to one of its holders so that bytes are balanced, and proves that the boxes of every tensor cover
    it exactly once. What is written is a standard DCP checkpoint.

    A tensor that SPMD replicates may be written in parts by several processes. An ordinary host tensor too, if its
    data is the same on all of them; if it differs, the lowest rank's is saved and a warning names the key. Items
    that are not tensors are saved from the lowest rank that has them, with the same warning if they differ.
    ``PerRank`` saves each rank's own.

    Args:
        access: how tensors are read from where they live. The default suits every tensor; simulated hosts pass
            their own.

    Raises (inside DCP's ``CheckpointException``, as every error of a planner; ``torch_xla_ckpt.save`` unwraps it):
        IncompleteCheckpointError: the processes together do not hold a tensor exactly once.
        CheckpointError: two values have one key, or processes disagree about a key's shape or dtype.
    """

    def __init__(self, *, access: Callable[[torch.Tensor], TensorAccess] = access_of):
        self._access_of = access
        self._leaves: dict[str, Leaf] = {}
        self._tensors: dict[str, TensorHandle] = {}
        self._source = ShardSource({})
        self._needs: dict[str, frozenset[str]] = {}
        self._unresolved = 0
        self._noting = threading.Lock()
        self._encoded: dict[str, Item] = {}  # objects that had to be encoded to be compared

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
        items: list[WriteItem] = []
        for key in self._leaves:
            items += _offers(key, self._tensors[key]) if key in self._tensors else [_dcp.object_item(key)]
        paths = {key: leaf.path for key, leaf in self._leaves.items()}
        return SavePlan(items, planner_data=LocalFacts(paths, self._digests(), _integers(paths)))

    @without_collector
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        facts: list[LocalFacts] = [plan.planner_data for plan in all_plans]
        divergent = _divergent(facts)
        offers = _gathered(all_plans)
        items: list[list[WriteItem]] = [[] for _ in all_plans]
        for rank, item in _assigned(offers, divergent):
            items[rank].append(item)
        metadata = {key: offer.metadata() for key, offer in offers.items()}
        for item in itertools.chain.from_iterable(items):
            saved = metadata[item.index.fqn]
            if item.tensor_data is not None and isinstance(saved, TensorStorageMetadata):
                saved.chunks.append(item.tensor_data.chunk)
        _prove_complete(metadata)
        if divergent:
            logger.warning(
                "these tensors and objects differ between processes, and the lowest rank's is saved: %s. To keep each "
                "process's own, wrap the value in torch_xla_ckpt.PerRank, or put the rank in the key",
                ", ".join(sorted(divergent)),
            )
        paths = {key: path for fact in reversed(facts) for key, path in _paths(fact)}
        plans = [replace(plan, items=own, planner_data=None) for plan, own in zip(all_plans, items)]
        return plans, Metadata(state_dict_metadata=metadata, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        written = {item.index.fqn for item in new_plan.items if item.tensor_data is None}
        self._encoded = {key: data for key, data in self._encoded.items() if key in written}
        tensors = (item for item in new_plan.items if item.tensor_data is not None)
        self._source.announce((item.index.fqn, _box(item)) for item in tensors)
        self._needs, self._unresolved = {}, len(new_plan.items)
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key = write_item.index.fqn
        if write_item.tensor_data is not None:
            part = self._source.take(key, _box(write_item))
            self._note(key, frozenset() if type(part) in _PLAIN else _tensor_needs(part))
            return part
        item = self._encoded.pop(key, None) or self._encode(key)
        self._note(key, item.needs)
        return item

    def _note(self, key: str, needs: frozenset[str]) -> None:
        """Keep what a load of ``key`` will need; after the last item, warn once."""
        with self._noting:
            if needs:
                self._needs[key] = needs
            self._unresolved -= 1
            if not self._unresolved and self._needs:
                _warn_of_needs(self._needs)

    def _encode(self, key: str) -> Item:
        value = self._leaves[key].value
        return value.open() if isinstance(value, Encoded) else encode(key, value, self._to_host)

    def part(self, item: WriteItem) -> int:
        """Which part of its tensor asking for the item's data brings to the host."""
        return self._source.part(item.index.fqn, _box(item))

    def host_bytes(self, key: str, part: int) -> int:
        """What asking for part of a tensor adds to host memory, in bytes: all that this process holds of it."""
        held = self._tensors[key]
        return held.access.host_bytes(held.tensor, held.layout, part)

    def sharding(self, key: str) -> str:
        """The tensor's sharding on this process's devices, for people."""
        return self._tensors[key].layout.sharding

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return lay_out({"": tensor}, self._access_of)[""].gather()

    def _digests(self) -> dict[str, bytes]:
        """Of all that other processes may hold with other data; none when there are no others."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return {}
        own = {key: held for key, held in self._tensors.items() if not held.layout.identical}
        objects = {key: leaf.value for key, leaf in self._leaves.items() if key not in self._tensors}
        return {
            **{key: _digest(held.gather()) for key, held in own.items()},
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


def _tensor_needs(tensor: torch.Tensor) -> frozenset[str]:
    """The name of a tensor's class, if loading it needs the caller's word."""
    cls = type(tensor)
    known = cls in torch.serialization.get_safe_globals()
    return frozenset() if known else frozenset({f"{cls.__module__}.{cls.__qualname__}"})


def _warn_of_needs(needs: Mapping[str, frozenset[str]]) -> None:
    named = [f"{key!r} ({', '.join(sorted(names))})" for key, names in sorted(needs.items())]
    rest = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    logger.warning(
        "a load will refuse these items unless it is told to admit their types: %s%s. Load them with "
        "allow_types=[...] (tensors of a subclass: torch.serialization.add_safe_globals), or save plain data instead; "
        "a nested Stateful is saved as an object unless the state dict holds its state_dict()",
        ", ".join(named[:_NAMED]),
        rest,
    )


@dataclass
class _Offer:
    """What all processes together offer to write under one key.

    ``example`` is the first item seen; ``holders`` gives for each chunk one item that writes it and the ranks that
    could, ascending. Chunks are told apart by offsets and sizes.
    """

    example: WriteItem
    rank: int
    holders: dict[tuple[torch.Size, torch.Size], tuple[WriteItem, list[int]]] = field(default_factory=dict)

    def metadata(self) -> TensorStorageMetadata | BytesStorageMetadata:
        """What the checkpoint says of the key, without any chunks yet."""
        tensor = self.example.tensor_data
        return BytesStorageMetadata() if tensor is None else TensorStorageMetadata(tensor.properties, tensor.size, [])


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return _dcp.box_of(item.tensor_data.chunk)


def _offers(key: str, held: TensorHandle) -> list[WriteItem]:
    """One item for each distinct box; a tensor without elements is recorded as one empty chunk."""
    layout = held.layout
    whole = Box.whole(layout.shape)
    boxes = layout.boxes if whole.volume else (whole,)
    properties = _dcp.properties(layout.dtype, held.tensor.requires_grad)
    return [_dcp.tensor_item(key, _dcp.chunk_of(box), properties, _dcp.size_of(layout.shape)) for box in boxes]


def _gathered(plans: Sequence[SavePlan]) -> dict[str, _Offer]:
    """The offers of all processes by key.

    Raises:
        CheckpointError: two processes disagree about what lies under a key.
    """
    offers: dict[str, _Offer] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            offer = offers.get(item.index.fqn)
            if offer is None:
                offer = offers[item.index.fqn] = _Offer(item, rank)
            elif not _agree(item.tensor_data, offer.example.tensor_data):
                raise CheckpointError(
                    f"processes disagree about {item.index.fqn!r}: rank {offer.rank} has {_kind(offer.example)}, "
                    f"rank {rank} has {_kind(item)}. To keep each process's own, put the rank in the key"
                )
            if item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                offer.holders.setdefault((chunk.offsets, chunk.sizes), (item, []))[1].append(rank)
    return offers


def _assigned(offers: Mapping[str, _Offer], divergent: Container[str]) -> Iterator[tuple[int, WriteItem]]:
    """Every item with the rank that writes it: chunks that several could write are given out balanced."""
    written: Counter[int] = Counter()
    contested: list[tuple[WriteItem, Claim]] = []
    for key, offer in offers.items():
        if offer.example.tensor_data is None:
            yield offer.rank, offer.example
            continue
        itemsize = offer.example.tensor_data.properties.dtype.itemsize
        for (offsets, sizes), (item, ranks) in offer.holders.items():
            if len(ranks) == 1:
                written[ranks[0]] += sizes.numel() * itemsize
                yield ranks[0], item
            else:
                box = Box(tuple(offsets), tuple(sizes))
                contested.append((item, Claim(box, itemsize, tuple(ranks), divisible=key not in divergent)))
    for piece in assign([claim for _, claim in contested], written):
        item, claim = contested[piece.claim]
        yield piece.rank, item if piece.box == claim.box else _dcp.part_of(item, piece.box)


def _integers(paths: Mapping[str, Path]) -> dict[str, list[int]]:
    if _dcp.IntegerKey not in set(map(type, itertools.chain.from_iterable(paths.values()))):
        return {}  # told in a fraction of the time, for programs with many thousands of keys
    found = {key: [n for n, e in enumerate(path) if type(e) is _dcp.IntegerKey] for key, path in paths.items()}
    return {key: positions for key, positions in found.items() if positions}


def _paths(facts: LocalFacts) -> Iterable[tuple[str, Path]]:
    return _with_integers(facts) if facts.integers else facts.paths.items()


def _with_integers(facts: LocalFacts) -> Iterator[tuple[str, Path]]:
    for key, path in facts.paths.items():
        positions = facts.integers.get(key, ())
        yield key, tuple(_dcp.IntegerKey(e) if n in positions else e for n, e in enumerate(path)) if positions else path


def _agree(a: TensorWriteData | None, b: TensorWriteData | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.size == b.size and a.properties.dtype == b.properties.dtype


def _kind(item: WriteItem) -> str:
    tensor = item.tensor_data
    return "an object" if tensor is None else f"a tensor of shape {tuple(tensor.size)}, {tensor.properties.dtype}"


def _divergent(facts: Sequence[LocalFacts]) -> set[str]:
    """Keys whose data is not the same on all processes that have them."""
    digests: dict[str, set[bytes]] = defaultdict(set)
    for fact in facts:
        for key, one in fact.digests.items():
            digests[key].add(one)
    return {key for key, seen in digests.items() if len(seen) > 1}


def _digest(tensor: torch.Tensor) -> bytes:
    flat = compact(tensor).reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_digest(flat.numpy().data)


def _prove_complete(metadata: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]) -> None:
    """Show that the chunks of every tensor cover it exactly once.

    Raises:
        IncompleteCheckpointError: naming every tensor for which they do not, and where.
    """
    broken = []
    for key, saved in metadata.items():
        if isinstance(saved, TensorStorageMetadata) and (flaws := _dcp.cover_flaws(saved)):
            broken.append((key, f"{key!r} of shape {tuple(saved.size)}: {'; '.join(map(str, flaws))}"))
    if broken:
        raise IncompleteCheckpointError(
            "the processes of this save do not hold every element exactly once:\n  "
            + "\n  ".join(text for _, text in broken)
            + "\nNothing was written. If the program runs on several hosts, every one of them must take part in the "
            "save, in one process group",
            keys=[key for key, _ in broken],
        )

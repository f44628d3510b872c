"""The coordinator's part of planning a save: gather every rank's offers, choose who writes, prove that all is written.

An offer is a ``WriteItem`` that a rank could write: it holds the data. Replicas are offered by several ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import CheckpointError, IncompleteCheckpointError
from torch_xla_ckpt.layout import Box, Claim, assign
from torch_xla_ckpt.state import TensorHandle


@dataclass
class Offer:
    """The offers of all ranks for one key.

    Args:
        example: the first item seen.
        rank: the rank that offered ``example``.
        holders: for each chunk, by offsets and sizes, one item that writes it and the ranks that hold it, ascending.
    """

    example: WriteItem
    rank: int
    holders: dict[tuple[torch.Size, torch.Size], tuple[WriteItem, list[int]]] = field(default_factory=dict)

    def metadata(self) -> TensorStorageMetadata | BytesStorageMetadata:
        """Return the checkpoint's metadata for the key, without any chunks yet."""
        tensor = self.example.tensor_data
        return BytesStorageMetadata() if tensor is None else TensorStorageMetadata(tensor.properties, tensor.size, [])


def offer_tensor(key: str, held: TensorHandle) -> list[WriteItem]:
    """Return one item for each distinct box; a tensor without elements is offered as one empty chunk."""
    layout = held.layout
    whole = Box.whole(layout.shape)
    boxes = layout.boxes if whole.volume else (whole,)
    properties = _dcp.properties(layout.dtype, held.tensor.requires_grad)
    return [_dcp.tensor_item(key, _dcp.chunk_of(box), properties, _dcp.size_of(layout.shape)) for box in boxes]


def gather_offers(plans: Sequence[SavePlan]) -> dict[str, Offer]:
    """Return the offers of all ranks by key.

    Args:
        plans: each rank's local plan.

    Raises:
        CheckpointError: two ranks offer different kinds, shapes or dtypes for one key.
    """
    offers: dict[str, Offer] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            offer = offers.get(item.index.fqn)
            if offer is None:
                offer = offers[item.index.fqn] = Offer(item, rank)
            elif not _agree(item.tensor_data, offer.example.tensor_data):
                raise CheckpointError(
                    f"ranks disagree about {item.index.fqn!r}: rank {offer.rank} has {_describe(offer.example)}, "
                    f"rank {rank} has {_describe(item)}. Nothing was written. To save the value of each rank, put the "
                    "rank in the key"
                )
            if item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                offer.holders.setdefault((chunk.offsets, chunk.sizes), (item, []))[1].append(rank)
    return offers


def assign_offers(offers: Mapping[str, Offer], divergent: Container[str]) -> Iterator[tuple[int, WriteItem]]:
    """Yield every item with the rank that writes it. Chunks that several ranks hold are balanced by bytes.

    Args:
        offers: the offers by key.
        divergent: keys whose data differs between ranks. One rank writes each of their chunks, undivided.
    """
    written: Counter[int] = Counter()
    shared: list[tuple[WriteItem, Claim]] = []
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
                shared.append((item, Claim(box, itemsize, tuple(ranks), divisible=key not in divergent)))
    for assigned in assign([claim for _, claim in shared], written):
        item, claim = shared[assigned.claim]
        yield assigned.rank, item if assigned.box == claim.box else _dcp.part_of(item, assigned.box)


def prove_complete(metadata: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]) -> None:
    """Prove that the chunks of every tensor cover it exactly once.

    Args:
        metadata: the checkpoint's entries by key, with the chunks that will be written.

    Raises:
        IncompleteCheckpointError: naming every incomplete tensor, and the regions.
    """
    broken = []
    for key, saved in metadata.items():
        if isinstance(saved, TensorStorageMetadata) and (flaws := _dcp.cover_flaws(saved)):
            broken.append((key, f"{key!r} of shape {tuple(saved.size)}: {'; '.join(map(str, flaws))}"))
    if broken:
        raise IncompleteCheckpointError(
            "the ranks of this save do not hold every element exactly once:\n  "
            + "\n  ".join(text for _, text in broken)
            + "\nNothing was written. If the program runs on several hosts, every host must take part in the save, in "
            "one process group",
            keys=[key for key, _ in broken],
        )


def _agree(a: TensorWriteData | None, b: TensorWriteData | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.size == b.size and a.properties.dtype == b.properties.dtype


def _describe(item: WriteItem) -> str:
    tensor = item.tensor_data
    return "an object" if tensor is None else f"a tensor of shape {tuple(tensor.size)}, {tensor.properties.dtype}"

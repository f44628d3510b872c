"""Planned reads fill boxes exactly, whether or not tensors that are cut alike were planned before."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.planner import ReadPlanner, ReadPlans

SHAPE = (6, 8)


def saved(rows, columns, lost=None):
    """A tensor that was saved in a grid of chunks; ``lost`` is the number of a chunk that is missing."""
    edges = [[0, *sorted(cuts), size] for cuts, size in zip((rows, columns), SHAPE)]
    chunks = [
        ChunkStorageMetadata(torch.Size((a, c)), torch.Size((b - a, d - c)))
        for a, b in zip(edges[0], edges[0][1:])
        for c, d in zip(edges[1], edges[1][1:])
    ]
    kept = [chunk for number, chunk in enumerate(chunks) if number != lost]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(SHAPE), kept)


def filled(plan, box):
    """The elements of the box of a tensor that counts from 0, as the reads fill them; -1 where no read does."""
    whole = np.arange(48).reshape(SHAPE)
    found = np.full(box.sizes, -1)
    for item in plan.items:
        if tuple(item.dest_index.offset) == box.offsets:
            first = [a + b for a, b in zip(item.storage_index.offset, item.storage_offsets)]
            source = tuple(slice(a, a + n) for a, n in zip(first, item.lengths))
            found[tuple(slice(a, a + n) for a, n in zip(item.dest_offsets, item.lengths))] = whole[source]
    return found


cuts = st.builds(
    saved, st.sets(st.integers(1, 5), max_size=2), st.sets(st.integers(1, 7), max_size=3), st.none() | st.integers(0, 4)
)
boxes = st.builds(
    lambda a, b, c, d: Box((min(a, b), min(c, d)), (abs(a - b) + 1, abs(c - d) + 1)),
    *(st.integers(0, 5), st.integers(0, 5), st.integers(0, 7), st.integers(0, 7)),
)


@given(
    st.lists(st.tuples(cuts, st.lists(boxes, min_size=1, max_size=3, unique_by=lambda box: box.offsets)), max_size=6)
)
def test_reads_of_many_tensors_are_those_of_each_tensor_alone(tensors):
    plans = ReadPlans()
    for number, (entry, wanted) in enumerate(tensors * 2):  # all cuts come again, under other keys
        key, source = f"target{number}", f"source{number}"
        together = plans.plan(key, source, wanted, entry)
        assert together == ReadPlanner(key, source, entry).plan(wanted)
        assert {item.dest_index.fqn for item in together.items} <= {key}
        assert {item.storage_index.fqn for item in together.items} <= {source}
        if not together.flaws:
            for box in wanted:
                assert (filled(together, box) == np.arange(48).reshape(SHAPE)[box.slices]).all()


def test_reads_are_right_after_more_cuts_than_are_remembered():
    plans = ReadPlans()
    entries = [saved({row}, {column}) for row in range(1, 6) for column in range(1, 8)]
    whole = Box.whole(SHAPE)
    for entry in entries * 2:
        assert (filled(plans.plan("t", "t", [whole], entry), whole) == np.arange(48).reshape(SHAPE)).all()
    assert plans.plan("t", "t", [whole], saved({2}, {3}, lost=1)).flaws
    assert not plans.plan("t", "t", [whole], saved({2}, {3})).flaws

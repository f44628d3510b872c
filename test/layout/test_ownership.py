"""Every element is assigned to exactly one rank that holds it, and bytes are balanced."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.boxes import array, boxes_in, count, shapes
from torch_xla_ckpt.layout import Box, Claim, assign, covers_exactly
from torch_xla_ckpt.layout.ownership import boxes_of_range


def written(claims):
    load = Counter()
    for assignment in assign(claims):
        load[assignment.rank] += assignment.box.volume * claims[assignment.claim].itemsize
    return load


@given(st.data())
def test_boxes_of_a_range_hold_exactly_the_elements_of_the_range(data):
    shape = data.draw(shapes(least=1))
    outer = data.draw(boxes_in(shape).filter(lambda box: box.volume))
    start = data.draw(st.integers(0, outer.volume))
    stop = data.draw(st.integers(start, outer.volume))
    boxes = list(boxes_of_range(outer, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    held = count(shape, boxes)[outer.slices].reshape(-1)
    assert (held == [start <= n < stop for n in range(outer.volume)]).all()


@st.composite
def claims(draw):
    sizes = st.lists(st.integers(0, 40), max_size=4).map(tuple)
    holders = st.sets(st.integers(0, 5), min_size=1).map(sorted).map(tuple)
    make = st.builds(Claim, sizes.map(Box.whole), st.sampled_from([1, 2, 4, 8]), holders, st.booleans())
    return draw(st.lists(make, max_size=8))


@given(claims())
def test_every_element_is_assigned_to_one_rank_that_holds_it(claims):
    assignments = assign(claims)
    for number, claim in enumerate(claims):
        own = [assignment for assignment in assignments if assignment.claim == number]
        assert own, "a claim without an assignment would be lost from the checkpoint"
        assert all(assignment.rank in claim.holders for assignment in own)
        assert covers_exactly(claim.box, array([assignment.box for assignment in own], len(claim.box.sizes)))
        if not claim.divisible:
            assert [assignment.rank for assignment in own] == [min(claim.holders)]


@given(claims())
def test_equal_claims_get_equal_assignments(claims):
    assert assign(claims) == assign(list(claims))


@pytest.mark.parametrize("processes", [2, 3, 4, 7, 64])
@pytest.mark.parametrize(
    "shape", [(1 << 20,), (5, 1_000_000), (1, 1, 1 << 20), (13, 13, 13, 13, 13), (1_000_003, 3), (3, 1 << 18, 5)]
)
def test_large_replicated_tensor_is_divided_among_all_holders(shape, processes):
    load = written([Claim(Box.whole(shape), 4, tuple(range(processes)))])
    assert max(load.values()) <= 1.1 * sum(load.values()) / processes


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=40), st.integers(2, 8))
def test_bytes_of_many_replicated_tensors_are_balanced(sizes, processes):
    load = written([Claim(Box.whole((n,)), 4, tuple(range(processes))) for n in sizes])
    mean = sum(load.values()) / processes
    assert max(load.values()) <= 1.02 * mean + 8192  # below that a claim is not cut


def test_a_thousand_tensors_on_eight_ranks_need_seven_cuts():
    """A thousand tensors on eight processes need seven cuts, not eight thousand items."""
    claims = [Claim(Box.whole((1000, 100)), 4, tuple(range(8))) for _ in range(1000)]
    assert len(assign(claims)) <= 1000 + 7 * 3


def test_rank_with_much_to_write_gets_fewer_shared_bytes():
    own = Claim(Box.whole((1 << 20,)), 4, (0,))
    shared = Claim(Box.whole((1 << 20,)), 4, (0, 1))
    assert written([own, shared]) == {0: 4 << 20, 1: 4 << 20}


def test_bytes_are_balanced_across_overlapping_groups_of_holders():
    inner = [Claim(Box.whole((1 << 18,)), 4, pair) for pair in ((0, 1), (2, 3))]
    outer = Claim(Box.whole((1 << 20,)), 4, (0, 1, 2, 3))
    load = written([outer, *inner])
    assert max(load.values()) <= 1.05 * sum(load.values()) / 4


def test_cuts_keep_whole_rows_together():
    assignments = assign([Claim(Box.whole((1000, 64)), 4, (0, 1))])
    assert [assignment.box for assignment in assignments] == [Box((0, 0), (500, 64)), Box((500, 0), (500, 64))]

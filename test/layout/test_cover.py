"""Exact covers are recognised, and missing or doubled regions are found, however the boxes are cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.boxes import array, boxes_in, count, shapes, tilings
from torch_xla_ckpt.layout import Box, covers_exactly, find_flaws


@given(tilings())
def test_every_tiling_is_an_exact_cover(tiling):
    whole, pieces = tiling
    assert covers_exactly(whole, array(pieces, len(whole.sizes)))
    assert find_flaws(whole, array(pieces, len(whole.sizes))) == ()


@given(tilings(), st.data())
def test_missing_box_is_found_at_its_position(tiling, data):
    whole, pieces = tiling
    lost = data.draw(st.sampled_from(pieces))
    rest = array([piece for piece in pieces if piece is not lost], len(whole.sizes))
    assert not covers_exactly(whole, rest)
    flaws = find_flaws(whole, rest, limit=10_000)
    assert {flaw.kind for flaw in flaws} == {"missing"}
    assert (count(whole.sizes, [flaw.box for flaw in flaws]) == count(whole.sizes, [lost])).all()


@given(tilings(), st.data())
def test_doubled_region_is_found_at_its_position(tiling, data):
    whole, pieces = tiling
    more = data.draw(boxes_in(whole.sizes).filter(lambda box: box.volume))
    doubled = array([*pieces, more], len(whole.sizes))
    assert not covers_exactly(whole, doubled)
    flaws = find_flaws(whole, doubled, limit=10_000)
    assert {flaw.kind for flaw in flaws} == {"doubled"}
    assert (count(whole.sizes, [flaw.box for flaw in flaws]) == count(whole.sizes, [more])).all()


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_any_boxes_are_judged_as_by_counting_every_element(data):
    shape = data.draw(shapes())
    boxes = data.draw(st.lists(boxes_in(shape), max_size=6))
    held = count(shape, boxes)
    assert covers_exactly(Box.whole(shape), array(boxes, len(shape))) == bool((held == 1).all())
    flaws = find_flaws(Box.whole(shape), array(boxes, len(shape)), limit=10_000)
    missing = count(shape, [flaw.box for flaw in flaws if flaw.kind == "missing"])
    doubled = count(shape, [flaw.box for flaw in flaws if flaw.kind == "doubled"])
    assert (missing == (held == 0)).all()
    assert (doubled == (held > 1)).all()


def test_hole_is_found_although_the_volumes_add_up():
    """The same half twice has the volume of the whole."""
    half = Box((0, 0), (2, 4))
    assert not covers_exactly(Box.whole((4, 4)), array([half, half], 2))


def test_box_outside_of_the_tensor_is_named():
    boxes = array([Box((0,), (6,))], 1)
    assert not covers_exactly(Box.whole((4,)), boxes)
    (flaw,) = find_flaws(Box.whole((4,)), boxes)
    assert (flaw.kind, flaw.box) == ("outside", Box((0,), (6,)))


@pytest.mark.parametrize("boxes, exact", [([], False), ([Box((), ())], True), ([Box((), ())] * 2, False)])
def test_scalar_needs_exactly_one_chunk(boxes, exact):
    assert covers_exactly(Box.whole(()), array(boxes, 0)) is exact


def test_tensor_whose_flat_index_exceeds_63_bits_is_judged_exactly():
    """Corners are sorted by their coordinates if a flat index does not fit into 63 bits."""
    n = 2**40
    quarters = [Box((a * n, b * n), (n, n)) for a, b in itertools.product((0, 1), repeat=2)]
    assert covers_exactly(Box.whole((2 * n, 2 * n)), array(quarters, 2))
    assert not covers_exactly(Box.whole((2 * n, 2 * n)), array(quarters[:3], 2))
    (flaw,) = find_flaws(Box.whole((2 * n, 2 * n)), array(quarters[:3], 2))
    assert flaw.box == quarters[3]


def test_region_need_not_start_at_zero():
    region = Box((2, 3), (2, 2))
    parts = [Box((2, 3), (1, 2)), Box((3, 3), (1, 2))]
    assert covers_exactly(region, array(parts, 2))
    assert find_flaws(region, array(parts[:1], 2))[0].box == parts[1]


@pytest.mark.parametrize("offsets, sizes", [((0,), (1, 2)), ((-1,), (2,)), ((0,), (-2,))])
def test_box_with_invalid_offsets_or_sizes_cannot_be_built(offsets, sizes):
    with pytest.raises(ValueError, match="box"):
        Box(offsets, sizes)

"""ChunkIndex finds the same chunks as a comparison with every chunk."""

from hypothesis import given
from hypothesis import strategies as st

from support.boxes import array, boxes_in, shapes, tilings
from torch_xla_ckpt.layout import Box, ChunkIndex


def intersection(one, other):
    """The region that two boxes share; None if they share no element."""
    starts = tuple(map(max, one.offsets, other.offsets))
    stops = [min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes)]
    sizes = tuple(stop - start for start, stop in zip(starts, stops))
    return Box(starts, sizes) if all(n > 0 for n in sizes) else None


def by_comparing_all(chunks, box):
    shared = ((number, intersection(chunk, box)) for number, chunk in enumerate(chunks))
    return [(number, part) for number, part in shared if part is not None]


@given(st.data())
def test_index_finds_every_overlapping_chunk(data):
    shape = data.draw(shapes())
    chunks = data.draw(st.lists(boxes_in(shape).filter(lambda box: box.volume), max_size=12))
    box = data.draw(boxes_in(shape).filter(lambda box: box.volume or not shape)) if 0 not in shape else Box.whole(shape)
    numbers, parts = ChunkIndex(array(chunks, len(shape))).overlaps(box)
    found = [(number, parts[n]) for n, number in enumerate(numbers.tolist())]
    assert found == by_comparing_all(chunks, box)


@given(tilings(), st.data())
def test_overlaps_with_a_tiling_add_up_to_the_box(tiling, data):
    whole, pieces = tiling
    box = data.draw(boxes_in(whole.sizes).filter(lambda box: box.volume))
    numbers, parts = ChunkIndex(array(pieces, len(whole.sizes))).overlaps(box)
    assert sum(parts[n].volume for n in range(len(parts))) == box.volume
    for n, number in enumerate(numbers.tolist()):
        assert pieces[number].contains(parts[n]) and box.contains(parts[n])

"""Who reads what: each byte once, by a rank that needs it, in an order in which nobody waits for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_xla_ckpt.cooperation import Needs, assign
from torch_xla_ckpt.cooperation.assignment import CUT

MIB = 1 << 20
LARGE = 1 << 40


def needs(items, ranges, budget=LARGE):
    """items: (is_tensor, key, file, start, stop); ranges: for each rank, {item number: [(start, stop), ...]}."""
    return [
        Needs.of([items[n][:4] for n in own], [own[n] for n in own], budget)
        for own in ({n: sorted(spans) for n, spans in one.items()} for one in ranges)
    ]


def all_bytes(count, nbytes, world, budget=LARGE):
    items = [(True, n, "file", n * nbytes, (n + 1) * nbytes) for n in range(count)]
    return needs(items, [{n: [items[n][3:]] for n in range(count)} for _ in range(world)], budget)


def spans_of(one):
    return [(one.files[one.items[n, 2]], start, stop) for n, start, stop in one.ranges.tolist()]


def elements(spans, unit):
    """The units of bytes in spans of files; a span that is no multiple of the unit is refused."""
    assert all(start % unit == stop % unit == 0 for _, start, stop in spans)
    return {(file, n) for file, start, stop in spans for n in range(start // unit, stop // unit)}


@st.composite
def loads(draw):
    """Items of several files, and for each rank some blocks of some items. A unit is a sixteenth of a block."""
    unit = CUT // 16
    world = draw(st.integers(2, 9))
    items, at = [], {}
    for key in range(draw(st.integers(1, 6))):
        is_tensor = draw(st.booleans())
        for _ in range(draw(st.integers(1, 3))):
            file = draw(st.sampled_from("abc"))
            length = draw(st.one_of(st.integers(1, 20), st.integers(30, 200))) * unit
            start = at.get(file, 0)
            at[file] = start + length
            items.append((is_tensor, key, file, start, start + length))
    ranges = []
    for _ in range(world):
        own = {}
        for number, (_, _, _, start, stop) in enumerate(items):
            blocks = list(range(start, stop, CUT))
            kept = draw(st.sets(st.sampled_from(blocks))) if draw(st.booleans()) else draw(st.just(set(blocks)))
            if kept:
                own[number] = [(block, min(block + CUT, stop)) for block in sorted(kept)]
        ranges.append(own)
    return items, ranges, unit, draw(st.sampled_from([CUT, 64 * MIB, LARGE]))


@settings(max_examples=100, deadline=None)
@given(loads())
def test_each_byte_is_read_once_by_a_rank_that_needs_it(load):
    items, ranges, unit, budget = load
    wanted = needs(items, ranges, budget)
    own = [elements(spans_of(one), unit) for one in wanted]
    everything = set().union(*own)
    shares = assign(wanted)
    if shares is None:
        assert sum(map(len, own)) == len(everything)
        return
    read = []
    for rank, (share, mine) in enumerate(zip(shares, own)):
        received = [parcel for parcel in share.parcels if parcel.reader != rank]
        got = [elements([(parcel.file, parcel.start, parcel.stop)], unit) for parcel in received]
        assert sum(map(len, got)) == len(set().union(*got)), "a parcel arrives twice"
        assert set().union(*got) <= mine, "a rank gets what it does not need"
        read.append(mine - set().union(*got))
    for rank, share in enumerate(shares):
        for parcel in share.parcels:
            assert (
                rank in (parcel.reader, *parcel.receivers)
                and parcel.reader not in parcel.receivers
                and parcel.receivers
            )
            assert elements([(parcel.file, parcel.start, parcel.stop)], unit) <= read[parcel.reader]
            assert all(parcel in shares[other].parcels for other in (parcel.reader, *parcel.receivers))
            item = next(i for i in items if i[2] == parcel.file and i[3] <= parcel.start < i[4])
            assert (parcel.start - item[3]) % CUT == 0, "a cut inside of a checksum's block"
    assert sum(map(len, read)) == len(everything)


@settings(max_examples=60, deadline=None)
@given(loads())
def test_no_rank_waits_for_ever_even_if_each_holds_one_round_at_a_time(load):
    items, ranges, _, budget = load
    wanted = needs(items, ranges, budget)
    shares = assign(wanted)
    if shares is None:
        return
    for one, share in zip(wanted, shares):
        in_round = dict(zip(zip(*one.items[:, 2:].T.tolist()), share.rounds.tolist()))
        kinds = one.items[:, 0]
        assert (
            not len(share.rounds)
            or kinds.min() == kinds.max()
            or share.rounds[kinds == 0].max() < share.rounds[kinds == 1].min()
        ), "objects come first"
        for parcel in share.parcels:
            (item,) = (i for i in items if i[2] == parcel.file and i[3] <= parcel.start < i[4])
            assert in_round[one.files.index(item[2]), item[3]] == parcel.round
    todo = [sorted(set(share.rounds.tolist())) for share in shares]
    while any(todo):
        begun = [own[0] if own else None for own in todo]

        def has_begun(rank, number, begun=begun):
            return begun[rank] is None or begun[rank] >= number

        done = [
            rank
            for rank, own in enumerate(todo)
            if own
            and all(
                has_begun(other, own[0])
                for parcel in shares[rank].parcels
                if parcel.round == own[0]
                for other in (parcel.reader, *parcel.receivers)
            )
        ]
        assert done, "all ranks wait"
        for rank in done:
            todo[rank].pop(0)


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_ranks_read_equal_parts(world):
    shares = assign(all_bytes(max(400, 10 * world), 3 * MIB + 64, world))
    read = np.zeros(world)
    for parcel in shares[0].parcels:
        read[parcel.reader] += parcel.nbytes
    assert read.max() <= 1.15 * read.mean(), read


def test_a_rank_with_much_of_its_own_reads_less_for_others():
    items = [(True, n, "file", n * 8 * MIB, (n + 1) * 8 * MIB) for n in range(8)]
    both = {n: [items[n][3:]] for n in range(4)}
    shares = assign(needs(items, [both | {n: [items[n][3:]] for n in range(4, 8)}, both]))
    assert {parcel.reader for parcel in shares[0].parcels} == {1}


def test_rounds_fit_into_the_smallest_memory_budget():
    budget = 32 * MIB
    one, *others = all_bytes(64, 4 * MIB, 4)
    small = Needs(one.files, one.items, one.ranges, budget)
    for share in assign([small, *others]):
        sizes = np.bincount(share.rounds) * 4 * MIB
        assert sizes.max() <= budget // 2


def test_what_is_not_worthwhile_is_not_shared():
    wanted = all_bytes(2, MIB, 2)
    assert assign(wanted, least_bytes=2 * MIB) is not None
    assert assign(wanted, least_bytes=2 * MIB + 1) is None
    assert assign([Needs.of([], [], LARGE)] * 3) is None
    assert assign([wanted[0], Needs.of([], [], LARGE)]) is None


def test_neighbouring_small_items_are_read_by_one_rank():
    shares = assign(all_bytes(4096, 4096, 4))
    assert len(shares[0].parcels) <= 8

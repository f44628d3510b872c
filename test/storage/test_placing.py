"""The table of what was written where: it is the same whether an earlier save's is used again or not."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_xla_ckpt as xc
from torch_xla_ckpt import _dcp
from torch_xla_ckpt.protocols import Version
from torch_xla_ckpt.serialization import MetadataWriter
from torch_xla_ckpt.storage.commit_checks import Candidate
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import Location
from torch_xla_ckpt.storage.manifest_tensors import KeptText
from torch_xla_ckpt.storage.manifest_writing import manifest_pieces
from torch_xla_ckpt.storage.pieces import joined_pieces
from torch_xla_ckpt.storage.places import NOWHERE, blocks_of, extents, unplaced
from torch_xla_ckpt.storage.placing import placed
from torch_xla_ckpt.storage.stored import BLOCK
from torch_xla_ckpt.storage.written import Runs, WrittenItems, written_bytes, written_sizes

NUMBERS = st.integers(-1, (1 << 62) - 1)


@given(st.lists(st.tuples(NUMBERS, st.integers(1, 5)), max_size=30))
def test_runs_come_back(pairs):
    numbers = np.array([value for value, count in pairs for _ in range(count)], dtype=np.int64)
    runs = pickle.loads(pickle.dumps(Runs.of(numbers)))
    assert runs.numbers().dtype == np.int64 and runs.numbers().tolist() == numbers.tolist()
    assert runs == Runs.of(numbers.copy())
    assert runs.total() == int(numbers.sum())


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 5)), min_size=1, max_size=30), st.sampled_from([0, 10, 1 << 18]))
def test_repeated_is_what_numpy_repeats(pairs, many):
    values, counts = np.array(pairs, dtype=np.int64).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_xla_ckpt._dcp.padding._MANY", many)
        assert _dcp.repeated(values, counts).tolist() == np.repeat(values, counts).tolist()


@given(
    st.lists(st.binary(max_size=3000), max_size=20),
    st.integers(1, 2000),
    st.integers(1, 2000),
)
def test_joined_pieces_have_the_same_bytes(pieces, large, joined):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_xla_ckpt.storage.pieces._LARGE", large)
        patch.setattr("torch_xla_ckpt.storage.pieces._PIECE", joined)
        found = list(joined_pieces(pieces))
    assert b"".join(found) == b"".join(pieces)
    assert all(any(piece is one for one in found) for piece in pieces if len(piece) >= large), "a large one was copied"


class Save:
    """What several ranks write of one catalog.

    Args:
        chance: a source of random choices.
        lengths: the bytes of each row.
        owner: the rank that writes each row.
    """

    def __init__(self, chance, lengths, owner, world):
        self.chance = chance
        self.lengths = np.array(lengths, dtype=np.int64)
        self.data = np.where(np.arange(len(lengths)) % 5 == 4, NOWHERE, 64)
        self.data[: len(lengths) // 2] = 64
        self.rows = [np.flatnonzero(np.array(owner) == rank) for rank in range(world)]
        self.files = [self.chance.integers(0, 2, len(rows)) for rows in self.rows]
        self.skipped: tuple[int, ...] = ()

    def results(self, save_id):
        """What each rank sends, and what must come of it: for each row, its file, offset, length, data, checksums."""
        sent, expected = [], {}
        first = np.concatenate([[0], np.cumsum(blocks_of(self.lengths))])
        checksums = self.chance.integers(0, 1 << 62, int(first[-1]))
        for rank, rows in enumerate(self.rows):
            ends, places = {}, {}
            for n in self.chance.permutation(len(rows)).tolist():
                name = f"__{rank}_{self.files[rank][n]}-{save_id}"
                places[n] = name, ends.get(name, 0)
                ends[name] = places[n][1] + int(extents(self.lengths[rows[n]]))
            kept = [n for n in range(len(rows)) if rows[n] not in self.skipped]
            names = tuple(sorted({places[n][0] for n in kept}))
            columns = np.array(
                [(n, names.index(places[n][0]), places[n][1], self.lengths[rows[n]], self.data[rows[n]]) for n in kept],
                dtype=np.int64,
            ).reshape(len(kept), 5)
            own = [checksums[first[rows[n]] : first[rows[n] + 1]] for n in kept]
            sent.append(WrittenItems.of_columns(names, *columns.T, b"".join(part.tobytes() for part in own)))
            for n, part in zip(kept, own):
                row = int(rows[n])
                expected[row] = (*places[n], int(self.lengths[row]), int(self.data[row]), part.tolist())
        return [pickle.loads(pickle.dumps(one)) for one in sent], expected


def found(places):
    return {
        row: (
            places.names[places.file[row]],
            int(places.offset[row]),
            int(places.length[row]),
            int(places.data[row]),
            places.checksums[places.first_block[row] : places.first_block[row + 1]].tolist(),
        )
        for row in range(len(places.file))
        if places.file[row] != NOWHERE
    }


def catalog_of(count):
    rows = np.ones((count, 2), dtype=np.int64)
    rows[:, 0] = np.arange(count)
    entry = _dcp.Entry("t", ("t",), torch.float32, (count,))
    return _dcp.Catalog((entry,), np.array([0, count]), rows)


CHANGES = {
    "nothing": lambda save: None,
    "a length": lambda save: save.lengths.__setitem__(0, save.lengths[0] + 200),
    "more blocks": lambda save: save.lengths.__setitem__(-1, save.lengths[-1] + BLOCK),
    "a position of the data": lambda save: save.data.__setitem__(0, 128),
    "a file": lambda save: save.files[0].__setitem__(0, 1 - save.files[0][0]),
    "another file": lambda save: save.files[0].__iadd__(7),
    "the order of a plan": lambda save: save.rows.__setitem__(0, save.rows[0][::-1].copy()),
    "equal rows in another array": lambda save: save.rows.__setitem__(0, save.rows[0].copy()),
    "who writes what": lambda save: (save.rows.reverse(), save.files.reverse()),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 64, 100, 1000, BLOCK, BLOCK + 1, 3 * BLOCK]), min_size=3, max_size=40),
    st.integers(1, 4),
    st.integers(0, 1 << 30),
    st.lists(st.sampled_from(sorted(CHANGES)), max_size=6),
    st.booleans(),
)
def test_places_are_right_whether_they_are_made_anew_or_not(lengths, world, seed, changes, is_small):
    chance = np.random.default_rng(seed)
    lengths = [100] * len(lengths) if is_small else lengths
    catalog = catalog_of(len(lengths))
    owner = [0, *chance.integers(0, world, len(lengths) - 1)]
    save, known = Save(chance, lengths, owner, world), None
    for number, change in enumerate(["nothing", *changes, "nothing"]):
        CHANGES[change](save)
        results, expected = save.results(f"{number:016x}")
        placing, places, files = placed(catalog, results, save.rows, known)
        assert found(places) == expected and not unplaced(catalog, places)
        assert files == written_sizes(results)
        assert sum(map(written_bytes, results)) == sum(save.lengths)
        if number and change == "nothing":
            assert placing is known
        known = placing


def saves(*changes, world=3, count=200):
    """Saves of one catalog, each after a change. Yields the places and sizes of each, as a coordinator gets them.

    There are two tensors, the first of which is packed, and an object.
    """
    chance = np.random.default_rng(1)
    rows, half = catalog_of(count).boxes, count // 2
    entries = [_dcp.Entry(key, (key,), torch.float32, (count,), False, key) for key in ("packed %d", 'listed "%s"')]
    first = np.array([0, half, count - 1, count])
    catalog, known = _dcp.Catalog((*entries, _dcp.Entry("object %", ("object %",))), first, rows), None
    save = Save(chance, [100 + 900 * (n % 3) for n in range(count)], chance.integers(0, world, count), world)
    for number, change in enumerate(changes):
        CHANGES[change](save)
        known, places, files = placed(catalog, save.results(f"{number:016x}")[0], save.rows, known)
        yield catalog, places, files


def test_records_that_use_kept_parts_are_a_full_encoding():
    """Every change in turn, and nothing in between, with the same writer and text for all of them."""
    changes = ["nothing", "nothing", *(one for change in CHANGES for one in (change, "nothing"))]
    writer = kept = None
    head = {"save_id": "0" * 16}
    reused = 0
    for number, (catalog, places, files) in enumerate(saves(*changes)):
        writer, kept = writer or MetadataWriter(catalog), kept or KeptText()
        meta = xc.ShardWriter("/x").storage_meta()
        before = {**kept.around, **kept.templates}
        reused += before != {}
        arguments = (meta, "1.0.0", places.names, places)
        assert b"".join(writer.pieces(*arguments)) == b"".join(MetadataWriter(catalog).pieces(*arguments))
        texts = [b"".join(manifest_pieces(head, files, {}, catalog, places, text)) for text in (kept, KeptText())]
        assert texts[0] == texts[1]
        if number == 1:
            assert len(kept.around) == 1 and len(kept.templates) == 2
            after = {**kept.around, **kept.templates}
            assert all(after[key] is text for key, text in before.items()), "nothing was used again"
    assert reused == len(changes) - 1


def test_columns_that_somebody_can_change_are_never_taken_for_the_same():
    catalog, places, files = next(saves("nothing"))
    for column in (places.file, places.length, places.data):
        column.flags.writeable = True
    writer, kept = MetadataWriter(catalog), KeptText()
    for _ in range(2):
        arguments = (xc.ShardWriter("/x").storage_meta(), "1.0.0", places.names, places)
        assert b"".join(writer.pieces(*arguments)) == b"".join(MetadataWriter(catalog).pieces(*arguments))
        texts = [b"".join(manifest_pieces({}, files, {}, catalog, places, text)) for text in (kept, KeptText())]
        assert texts[0] == texts[1]
        places.file[:5], places.length[:5], places.data[:] = 1, 5000, 192


def test_missing_rows_are_named_whether_the_rank_wrote_a_prefix_or_not():
    chance = np.random.default_rng(0)
    for skipped in ((9,), (0, 4), tuple(range(10))):
        save = Save(chance, [100] * 10, [0] * 10, 1)
        save.skipped = skipped
        results, _ = save.results("0" * 16)
        _, places, _ = placed(catalog_of(10), results, save.rows)
        assert unplaced(catalog_of(10), places) == {"t": len(skipped)}


@pytest.mark.parametrize("change", [{"checksums": b"8 bytes!"}, {"units": np.zeros(3, dtype=np.uint8)}])
def test_a_rank_that_sends_too_few_numbers_is_refused(change):
    save = Save(np.random.default_rng(0), [100] * 10, [0] * 10, 1)
    results, _ = save.results("0" * 16)
    known, _, _ = placed(catalog_of(10), results, save.rows)
    (own,) = results
    broken = WrittenItems(**{**{name: getattr(own, name) for name in own.__dataclass_fields__}, **change})
    for before in (None, known):
        with pytest.raises(xc.CheckpointError, match="another number"):
            placed(catalog_of(10), [broken], save.rows, before)


# The version of .metadata, which a commit compares


def version(path):
    return open_folder(Location.of(path)).version(".metadata")


def test_a_sealed_file_is_known_by_its_end(tmp_path):
    file = tmp_path / ".metadata"
    assert not version(tmp_path).exists
    versions = []
    for n in range(2):
        xc.save({"t": torch.zeros(5), "n": n}, tmp_path, sync=False)
        versions.append(version(tmp_path))
    first, second = versions
    assert first.exists and second.exists and not first.is_same(second)
    data = file.read_bytes()
    file.write_bytes(data)
    assert version(tmp_path).is_same(second)
    assert version(tmp_path).end == data[-Version.ENDING :]
    for other in (b"x" + data, data + b"x", data[:-1], data[: len(data) // 2], b"", data[:-3] + b"0\n\n"):
        file.write_bytes(other)
        assert not version(tmp_path).is_same(second)
        assert version(tmp_path).is_same(version(tmp_path)) and version(tmp_path).end == other[-Version.ENDING :]


def test_a_file_without_a_seal_is_known_by_all_its_bytes(tmp_path):
    data = bytearray(torch.arange(3 << 20, dtype=torch.uint8).numpy())
    (tmp_path / ".metadata").write_bytes(data)
    before = version(tmp_path)
    data[1000] ^= 1
    (tmp_path / ".metadata").write_bytes(data)
    assert not version(tmp_path).is_same(before)


@pytest.mark.parametrize("other", [b"stock DCP's", None])
def test_a_commit_by_anybody_else_is_noticed(tmp_path, other, monkeypatch):
    """After the beginning of a save, .metadata is replaced by a file of another program, or removed."""
    xc.save({"t": torch.zeros(5)}, tmp_path, sync=False)
    real = Candidate.require_files

    def meanwhile(*arguments):
        real(*arguments)
        if other is None:
            (tmp_path / ".metadata").unlink()
        else:
            (tmp_path / ".metadata").write_bytes(other)

    monkeypatch.setattr(Candidate, "require_files", meanwhile)
    with pytest.raises(xc.ConcurrentSaveError):
        xc.save({"t": torch.ones(5)}, tmp_path, sync=False)

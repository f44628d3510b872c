"""Checkpoints with tensors of many chunks: what is written opens everywhere, and what is read is not trusted."""

import base64
import contextlib
import copy
import dataclasses
import gc
import json
import pickle
import re
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)

import torch_xla_ckpt as xc
from support import interpreters
from support.boxes import tilings
from support.cuts import CutAccess, grid
from support.paths import TEST
from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.serialization import MetadataWriter, read_metadata
from torch_xla_ckpt.storage import records
from torch_xla_ckpt.storage.columns import decoded_column, encoded_column
from torch_xla_ckpt.storage.manifest_tensors import KeptText
from torch_xla_ckpt.storage.manifest_writing import manifest_pieces
from torch_xla_ckpt.storage.places import Places, StorageEntries
from torch_xla_ckpt.storage.saved_metadata import SavedMetadata, send_as_arrays, shortened

CUT = CutAccess(grid(24, 4))


def state():
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(240, 64, generator=generator)
    return {"model": {"w": w, "again": w + 1, "b": torch.arange(5.0), "half": w.to(torch.bfloat16)}, "step": 3}


def zeros():
    return {
        "model": {key: torch.zeros_like(value) for key, value in state()["model"].items()},
        "step": 0,
    }


def save(path, values=None):
    planner = xc.SPMDSavePlanner(access=CUT)
    return dcp.save(values or state(), storage_writer=xc.ShardWriter(path, sync=False), planner=planner)


def manifest_of(path):
    (file,) = path.glob("manifest-*.json")
    return json.loads(file.read_bytes())


def assert_restored(target):
    for key, value in state()["model"].items():
        assert torch.equal(target["model"][key], value), key


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed")
    save(path)
    return path


def test_tensors_of_many_chunks_are_packed_and_others_are_lists(saved):
    top = manifest_of(saved)
    assert top["version"] == 2
    assert {key for key, tensor in top["tensors"].items() if "packed" in tensor} == {
        "model.w",
        "model.again",
        "model.half",
    }
    assert len(top["boxes"]) == 1 and len(top["tensors"]["model.b"]["chunks"]) == 1


def test_a_checkpoint_without_such_tensors_has_version_1(tmp_path):
    xc.save(state(), tmp_path)
    assert manifest_of(tmp_path)["version"] == 1


@pytest.mark.parametrize("reader", [xc.ShardReader, dcp.FileSystemReader])
@pytest.mark.parametrize("planner", [xc.SPMDLoadPlanner, dcp.DefaultLoadPlanner])
def test_every_reader_restores_packed_tensors(saved, reader, planner):
    target = zeros()
    dcp.load(target, storage_reader=reader(saved), planner=planner())
    assert_restored(target)


def test_other_boxes_than_the_saved_ones_are_restored(saved):
    target = zeros()
    planner = xc.SPMDLoadPlanner(access=CutAccess(grid(7, 3)))
    dcp.load(target, storage_reader=xc.ShardReader(saved), planner=planner)
    assert_restored(target)
    assert planner.report.outcomes["model.w"].resharded


@pytest.mark.slow
def test_a_process_without_this_package_reads_the_metadata(saved):
    program = f"""
import pickle
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
with open({str(saved / ".metadata")!r}, "rb") as file:
    metadata = pickle.load(file)
assert type(metadata) is Metadata and len(metadata.state_dict_metadata["model.w"].chunks) == 96
assert len(metadata.storage_data) == 3 * 96 + 2 and MetadataIndex("step") in metadata.storage_data
assert b"torch_xla_ckpt" not in open({str(saved / ".metadata")!r}, "rb").read()[:-67]
"""
    options = {"env": {"PYTHONPATH": ""}, "modules": interpreters.STOCK, "cwd": "/"}
    done = interpreters.run(["-c", program], **options)
    assert done.returncode == 0, done.stderr


def test_the_reader_in_format_md_reads_packed_tensors_with_numpy_alone(tmp_path):
    values = {key: value for key, value in state()["model"].items() if key != "half"}
    save(tmp_path / "checkpoint", values)
    assert manifest_of(tmp_path / "checkpoint")["version"] == 2
    text = (TEST.parent / "docs" / "format.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program = f"{example}\nimport sys; assert 'torch' not in sys.modules; np.savez('found.npz', **tensors)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    with np.load(tmp_path / "found.npz") as found:
        assert all(np.array_equal(found[key], value.numpy()) for key, value in values.items())


def test_listing_and_verification_know_packed_tensors(saved):
    assert xc.verify(saved).ok
    listed = {one.key: one for one in xc.inspect(saved).keys}
    assert listed["model.w"].chunks == 96 and listed["model.w"].sharding == "cut"


def test_damage_in_one_chunk_is_named_with_its_key_and_place(tmp_path):
    save(tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    index = MetadataIndex("model.again", (120, 16))
    place = metadata.storage_data[index]
    with open(tmp_path / place.relative_path, "r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)
        file.seek(place.offset + place.length // 2)
        file.write(bytes([byte[0] ^ 1]))
    (damage,) = xc.verify(tmp_path).damages
    assert damage.keys == ("model.again",) and damage.file == place.relative_path and damage.start == place.offset
    with pytest.raises(xc.CorruptCheckpointError, match=r"model\.again"):
        xc.load(zeros(), tmp_path)


def test_a_lost_manifest_leaves_the_tensors_readable(tmp_path, caplog):
    save(tmp_path)
    for file in tmp_path.glob("manifest-*"):
        file.unlink()
    target = zeros()
    xc.load(target, storage_reader=xc.ShardReader(tmp_path, verify=False))
    assert_restored(target)


# What a hostile manifest may say.


def publish(path, top):
    """Write a manifest with valid checksums, as an attacker with write access can."""
    (file,) = path.glob("manifest-*.json")
    top = {key: value for key, value in top.items() if key != "xxh3_64"}
    body = json.dumps(top).encode()[:-1] + b","
    data = body + b'\n"xxh3_64": "%s"}' % xxhash.xxh3_64_hexdigest(body).encode()
    file.write_bytes(data)
    old = (path / ".metadata").read_bytes()
    start = old.rindex(b"\ntorch_xla_ckpt ")
    line = old[:start] + b"\ntorch_xla_ckpt %s %s " % (top["save_id"].encode(), xxhash.xxh3_64_hexdigest(data).encode())
    (path / ".metadata").write_bytes(line + xxhash.xxh3_64_hexdigest(line).encode() + b"\n")


def packed(top, key="model.w"):
    return top["tensors"][key]["packed"]


def column(numbers, width=4):
    return base64.b64encode(np.array(numbers, dtype=f"<u{width}").tobytes()).decode()


def moved(top):
    """Two chunks at one place."""
    first = np.frombuffer(base64.b64decode(packed(top)["offset"]), dtype="<u2").copy()
    first[1] = first[0]
    packed(top)["offset"] = base64.b64encode(first.tobytes()).decode()


HOSTILE = {
    "a count without checksums": lambda top: top["boxes"][0].update(count=1 << 40),
    "a count of columns": lambda top: top["boxes"][0].update(count=95),
    "no count": lambda top: top["boxes"][0].update(count=0),
    "a negative count": lambda top: top["boxes"][0].update(count=-1),
    "a count that is no number": lambda top: top["boxes"][0].update(count=True),
    "too few checksums": lambda top: packed(top).update(checksums=packed(top)["checksums"][:-12]),
    "checksums that are no text": lambda top: packed(top).update(checksums=7),
    "two chunks at one place": moved,
    "another file": lambda top: packed(top).update(file=99),
    "a negative file": lambda top: packed(top).update(file=-1),
    "a file that is no number": lambda top: packed(top).update(file=None),
    "a far offset": lambda top: packed(top).update(offset=1 << 61),
    "offsets of 64 bits": lambda top: packed(top).update(offset=column([2**64 - 1] * 96, 8)),
    "a length of all": lambda top: packed(top).update(length=1 << 50),
    "a position outside of the item": lambda top: packed(top).update(data=1 << 40),
    "a negative position": lambda top: packed(top).update(data=-1),
    "boxes that are not there": lambda top: packed(top).update(boxes=1),
    "negative boxes": lambda top: packed(top).update(boxes=-1),
    "no base64": lambda top: packed(top).update(offset="*" * 400),
    "text that is no ASCII": lambda top: packed(top).update(offset="\u00e9" * 400),
    "a width of 3": lambda top: packed(top).update(offset=base64.b64encode(bytes(3 * 96)).decode()),
    "sizes that overflow": lambda top: top["boxes"][0].update(sizes=[1 << 40, 1 << 40]),
    "dimensions that the tensor lacks": lambda top: top["boxes"][0].update(offsets=[0] * 3, sizes=[1] * 3),
    "thousands of dimensions": lambda top: (
        top["boxes"][0].update(offsets=[0] * 5000, sizes=[1] * 5000),
        top["tensors"]["model.w"].update(shape=[1] * 5000),
    ),
    "a sharding that is not listed": lambda top: top["tensors"]["model.w"].update(sharding=5),
    "a sharding that is no text": lambda top: top.update(shardings=[["x"]]),
    "a flag of text": lambda top: top["tensors"]["model.w"].update(requires_grad="yes"),
    "a dtype that is code": lambda top: top["tensors"]["model.w"].update(dtype="load"),
    "an object with a tensor's bytes": lambda top: top["objects"]["step"].__setitem__(3, 0),
    "a larger file": lambda top: top["files"][0].__setitem__(1, top["files"][0][1] + 64),
    "a file outside of the folder": lambda top: top["files"][0].__setitem__(0, "../other"),
    "no boxes": lambda top: top.pop("boxes"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused_before_anything_is_read(change, saved, tmp_path):
    save(tmp_path)
    top = manifest_of(tmp_path)
    change(top)
    publish(tmp_path, top)
    target = zeros()
    with pytest.raises(xc.CheckpointError):
        xc.load(target, tmp_path)
    assert not any(value.any() for value in target["model"].values())
    with contextlib.suppress(xc.CheckpointError):
        assert not xc.verify(tmp_path).ok


def test_a_manifest_that_is_written_again_unchanged_is_accepted(tmp_path):
    save(tmp_path)
    publish(tmp_path, manifest_of(tmp_path))
    target = zeros()
    xc.load(target, tmp_path)
    assert_restored(target)


def test_chunks_that_leave_a_hole_are_refused_by_the_proof(tmp_path):
    save(tmp_path)
    top = manifest_of(tmp_path)
    top["boxes"][0]["offsets"][0] = 0  # all chunks lie in the first rows
    publish(tmp_path, top)
    with pytest.raises(xc.IncompleteCheckpointError, match=r"model\.w"):
        xc.load(zeros(), tmp_path)


# The bytes of ``.metadata``.


@given(st.lists(st.integers(0, (1 << 62) - 1), min_size=1, max_size=70))
def test_columns_come_back(numbers):
    array = np.array(numbers, dtype=np.int64)
    text = json.loads(encoded_column(array))
    assert decoded_column(text, len(array)).tolist() == numbers


KEYS = st.text(st.characters(), max_size=8)


@st.composite
def catalogs(draw):
    """A catalog of tensors and objects with odd names, and the plain metadata that DCP would have."""
    entries, rows, counts = [], [], []
    for key in draw(st.lists(KEYS, min_size=1, max_size=6, unique=True)):
        path = tuple(draw(st.lists(st.one_of(KEYS, st.integers(0, 1 << 40)), min_size=1, max_size=3)))
        if draw(st.booleans()):
            entries.append(_dcp.Entry(key, path))
            boxes = [Box((), ())]
        else:
            whole, boxes = draw(tilings())
            far = draw(st.sampled_from([0, 1 << 31, 1 << 40]))
            boxes = [Box(tuple(o + far for o in box.offsets), box.sizes) for box in boxes]
            dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool]))
            shape = tuple(n + far for n in whole.sizes)
            entries.append(_dcp.Entry(key, path, dtype, shape, draw(st.booleans()) and dtype.is_floating_point))
        rows.append(boxes)
        counts.append(len(boxes))
    ndim = max(len(box.sizes) for boxes in rows for box in boxes)
    table = np.array([_dcp.padded_row(box, ndim) for boxes in rows for box in boxes], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(counts)])
    return _dcp.Catalog(tuple(entries), first, table.reshape(len(table), 2 * ndim)), rows


def places_of(catalog, generator, files, bits=45):
    numbers = generator.integers(0, 1 << bits, (2, len(catalog)))
    file = generator.integers(0, len(files), len(catalog))
    nothing = np.zeros(0, dtype=np.int64)
    return Places(files, file, numbers[0] // 64 * 64, numbers[1] // 2, np.zeros(len(catalog), np.int64), nothing)


@settings(max_examples=150, deadline=None)
@given(
    catalogs(),
    st.integers(0, 1 << 30),
    st.sampled_from([None, (None,), ({"a": 1.5},)]),
    st.lists(st.sampled_from([20, 45]), min_size=2, max_size=2),
)
def test_the_pickle_is_what_dcp_would_have_pickled(made, seed, planner_data, bits):
    catalog, rows = made
    writer = MetadataWriter(catalog, planner_data)
    for attempt in range(2):  # the second one uses parts of the first one again
        generator = np.random.default_rng(seed + attempt)
        files = [f"__{n}_0-{'ab'[attempt] * 16}.distcp" for n in range(3)]
        places = places_of(catalog, generator, files, bits[attempt])
        meta = StorageMeta(checkpoint_id="/x", save_id="ab"[attempt] * 16)
        data = b"".join(writer.pieces(meta, "1.0.0", places.names, places))
        assert data == b"".join(MetadataWriter(catalog, planner_data).pieces(meta, "1.0.0", places.names, places))
        plain = Metadata(
            {}, planner_data[0] if planner_data else {e.key: e.path for e in catalog.entries}, {}, meta, "1.0.0"
        )
        row = 0
        for entry, boxes in zip(catalog.entries, rows):
            chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes]
            plain.state_dict_metadata[entry.key] = entry.metadata(chunks)
            for chunk in chunks:
                index = MetadataIndex(entry.key, None if entry.dtype is None else chunk.offsets)
                place = (places.names[places.file[row]], int(places.offset[row]), int(places.length[row]))
                plain.storage_data[index] = _dcp.storage_info(*place)
                row += 1
        for found in (pickle.loads(data), read_metadata(data)):
            assert found == plain
            assert [type(v) for v in found.state_dict_metadata.values()] == [
                type(v) for v in plain.state_dict_metadata.values()
            ]


def test_the_second_save_writes_what_a_full_encoding_would(tmp_path):
    save(tmp_path)
    _, parts = records._kept[0]
    metadata = save(tmp_path, {**state(), "step": "an object of another length"})
    assert records._kept[0][1] is parts, "the second save has used nothing of the first one"
    entries = metadata.storage_data
    data = (tmp_path / ".metadata").read_bytes()
    full = MetadataWriter(entries.catalog).pieces(
        metadata.storage_meta, pickle.loads(data).version, entries.places.names, entries.places
    )
    pickled = b"".join(full)
    assert data.startswith(pickled) and re.fullmatch(rb"\ntorch_xla_ckpt .*\n", data[len(pickled) :])
    target = zeros()
    xc.load(target, tmp_path)
    assert_restored(target)
    assert target["step"] == "an object of another length" and xc.verify(tmp_path).ok


def test_a_manifest_with_kept_text_is_what_a_full_encoding_gives():
    """Which tensors are packed can change from save to save, although the catalog stays the same."""
    count = 64
    keys = ["a", "b", "c"]
    entries = [_dcp.Entry(key, (key,), torch.float32, (count if key == "a" else 2 * count,), True, key) for key in keys]
    first = np.array([0, count, 2 * count, 3 * count, 3 * count + 1])
    rows = np.ones((3 * count + 1, 2), dtype=np.int64)
    rows[:count, 0] = np.arange(count)
    rows[count : 3 * count] = np.column_stack([np.tile(2 * np.arange(count), 2), np.full(2 * count, 2)])
    catalog = _dcp.Catalog((*entries, _dcp.Entry("object", ("object",))), first, rows)
    kept, texts = KeptText(), []
    for seed, mixed in enumerate([(), ("a",), ("b",), ("a", "c"), ()]):
        places = places_of(catalog, np.random.default_rng(seed), ["f", "g"], bits=22)
        for key in mixed:
            places.data[first[keys.index(key)]] = -1
        places = Places(places.names, places.file, places.offset, places.length, places.data, np.arange(len(catalog)))
        some = [
            b"".join(manifest_pieces({}, {"f": 1, "g": 2}, {}, catalog, places, text)) for text in (kept, KeptText())
        ]
        assert some[0] == some[1]
        tensors = json.loads(some[0])["tensors"]
        assert [key for key, tensor in tensors.items() if "packed" not in tensor] == list(mixed)
        texts.append(some[0])
    assert len(set(texts)) == len(texts)


def test_pieces_of_large_records_are_small():
    """Python's lock is held while a piece is made."""
    count = 300_000
    entries = [_dcp.Entry(f"t{n}", (f"t{n}",), torch.float32, (count, 4)) for n in range(3)]
    rows = np.zeros((3 * count, 4), dtype=np.int64)
    rows[:, 0], rows[:, 2:] = np.tile(np.arange(count), 3), (1, 4)
    catalog = _dcp.Catalog(tuple(entries), np.arange(4) * count, rows)
    places = places_of(catalog, np.random.default_rng(0), ["f"])
    pieces = MetadataWriter(catalog).pieces(StorageMeta(), "1", places.names, places)
    sizes = [len(piece) for piece in pieces]
    assert sum(sizes) > 40 * len(catalog) and max(sizes) < 4 << 20


def test_metadata_for_other_ranks_holds_arrays_once_and_pickles_as_plain_metadata_then(saved, tmp_path):
    metadata = save(tmp_path)
    plain = pickle.dumps(metadata)
    assert type(pickle.loads(plain)) is Metadata
    send_as_arrays(metadata)
    sent = pickle.dumps(metadata)
    arrived = pickle.loads(sent)
    assert len(sent) < len(plain) / 3
    assert isinstance(arrived, SavedMetadata) and "state_dict_metadata" not in vars(arrived)  # nobody has looked yet
    assert arrived == metadata and "state_dict_metadata" in vars(arrived) and type(arrived) is SavedMetadata
    assert repr(metadata).startswith(repr(arrived)[:-1])
    assert isinstance(arrived.storage_data, StorageEntries)
    assert dict(arrived.storage_data) == dict(metadata.storage_data) == pickle.loads(plain).storage_data
    for again in (metadata, arrived):
        assert pickle.loads(pickle.dumps(again)) == pickle.loads(plain) == copy.deepcopy(again)
    assert arrived.state_dict_metadata["model.w"].properties == TensorProperties(torch.float32)


LOOKS = {
    "a field": lambda metadata: metadata.planner_data,
    "another field": lambda metadata: metadata.storage_data[MetadataIndex("step")],
    "fields in threads": lambda metadata: list(
        ThreadPoolExecutor(8).map(lambda n: (metadata.storage_data, metadata.planner_data)[n % 2], range(64))
    ),
    "repr": repr,
    "equality": lambda metadata: metadata == pickle.loads(pickle.dumps(metadata)),
    "a copy": copy.deepcopy,
    "replace": lambda metadata: dataclasses.replace(metadata, version="2"),
    "the report": lambda metadata: shortened(metadata, None),
    "an assignment": lambda metadata: setattr(metadata, "version", metadata.version),
    "nothing": lambda metadata: None,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_metadata_that_arrived_is_unpacked_whoever_looks_at_it_first(look, saved, tmp_path):
    metadata = save(tmp_path)
    send_as_arrays(metadata)
    arrived = pickle.loads(pickle.dumps(metadata))
    look(arrived)
    assert arrived == metadata and dict(arrived.storage_data) == dict(metadata.storage_data)
    assert pickle.loads(pickle.dumps(arrived)) == pickle.loads(pickle.dumps(metadata))


@given(st.lists(tilings(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_offers_hold_equal_boxes_once(tiled, chance):
    """Boxes of values with other numbers of dimensions, in any order, and values of which a rank holds nothing."""
    own = [
        [],
        *([box for box in boxes if chance.random() < 0.8] for _, boxes in tiled for _ in range(chance.randint(1, 3))),
    ]
    chance.shuffle(own)
    ndim = max(len(whole.sizes) for whole, _ in tiled)
    counts = np.array(list(map(len, own)), dtype=np.int64)
    listed = [_dcp.padded_row(box, ndim) for boxes in own for box in boxes]
    rows = np.array(listed, dtype=np.int64).reshape(len(listed), 2 * ndim)
    entries = [_dcp.Entry(str(n), (str(n),), torch.float32, (1,)) for n in range(len(own))]
    packed = pickle.loads(pickle.dumps(_dcp.Offers(entries, counts, rows)))
    assert packed.counts.tolist() == counts.tolist() and len(packed) == len(rows)
    for wider in (0, 2):
        wide = packed.boxes(ndim + wider)
        assert wide.tolist() == _dcp.repadded(rows, ndim + wider).tolist() and wide.dtype == np.int64


def test_parts_of_old_catalogs_are_dropped(tmp_path):
    """A program whose state changes at every save must not fill the memory."""
    catalogs = []
    for n in range(6):
        catalogs.append(weakref.ref(save(tmp_path, {**state(), f"new{n}": n}).storage_data.catalog))
    gc.collect()
    assert sum(catalog() is not None for catalog in catalogs) <= 2


def test_two_saves_never_use_the_same_parts(tmp_path):
    catalog = save(tmp_path).storage_data.catalog
    assert records._taken(catalog) is not None
    assert records._taken(catalog) is None
    assert save(tmp_path).storage_data.catalog is catalog and records._taken(catalog) is not None

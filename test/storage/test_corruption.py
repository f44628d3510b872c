"""Damage in any file of a checkpoint is found, and reported with the right key, file and byte range.

Bits are flipped in place and flipped back, so that one checkpoint serves for hundreds of positions.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pickle
import random
import shutil
import socket

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import torch_xla_ckpt as xc
from support.meshes import holds, mesh, put, random_bits, same_bits
from torch_xla_ckpt import inspecting

BLOCK = 4 << 20
SEAL = 2 + len("torch_xla_ckpt") + 3 * 17  # the last line of .metadata, with the line breaks around it

# A tensor of four blocks whose zip tail lies in a block of its own, so that loading never reads the tail.
LARGE = (4 * BLOCK - 640) // 4
HOST = {
    "large": random_bits((LARGE,), torch.float32, 1),
    "rows": random_bits((700, 2000), torch.float32, 2),  # 5.6 MB: over a block's end
    "small": random_bits((3, 5), torch.bfloat16, 3),
    "one": random_bits((), torch.float64, 4),
    "flags": random_bits((131,), torch.bool, 5),
    "wärme.λ": random_bits((9, 1), torch.complex64, 6),
    "sharded": random_bits((40, 12), torch.float32, 7),
}
OBJECTS = {"step": 7, "words": ("a", [1, {"b": 2.5}])}
KEYS = {f"model.{key}" for key in HOST} | set(OBJECTS)


def target(keys=(*HOST, *OBJECTS)):
    tensors = {key: torch.zeros_like(host) for key, host in HOST.items() if key in keys}
    return {"model": tensors, **{key: None for key in OBJECTS if key in keys}}


def is_whole(state):
    return all(same_bits(tensor, HOST[key]) for key, tensor in state["model"].items()) and all(
        state[key] == value for key, value in OBJECTS.items() if key in state
    )


@dataclasses.dataclass(frozen=True)
class Item:
    """The place of an item, parsed from the manifest as docs/format.md describes it."""

    key: str
    file: str
    offset: int
    length: int
    data: int | None  # from the item's start
    nbytes: int

    @property
    def end(self):
        """The end of the item with the zeros behind it."""
        return self.offset + -(-self.length // 64) * 64

    def is_needed(self, position):
        """Whether loading the whole item reads the block of a position."""
        if self.data is None:
            return True
        first, last = self.data // BLOCK, (self.data + self.nbytes - 1) // BLOCK
        return first <= (position - self.offset) // BLOCK <= last


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a checkpoint by kind."""

    path: object
    manifest: str
    data: tuple[str, ...]
    items: tuple[Item, ...]

    def size(self, name):
        return (self.path / name).stat().st_size

    def item_at(self, name, position):
        return next(item for item in self.items if item.file == name and item.offset <= position < item.end)


def files_of(path):
    (manifest,) = path.glob("manifest-*.json")
    top = json.loads(manifest.read_bytes())
    names = [name for name, _ in top["files"]]
    items = []
    for key, tensor in top["tensors"].items():
        itemsize = getattr(torch, tensor["dtype"]).itemsize
        for _, sizes, number, offset, length, data, _ in tensor["chunks"]:
            items.append(Item(key, names[number], offset, length, data, torch.Size(sizes).numel() * itemsize))
    for key, (number, offset, length, _, _) in top["objects"].items():
        items.append(Item(key, names[number], offset, length, None, 0))
    files = Files(path, manifest.name, tuple(sorted(names)), tuple(items))
    assert {child.name for child in path.iterdir()} == {".metadata", manifest.name, *names}
    return files


def save(path, by=1, **options):
    tensors = {key: host * by if by != 1 else host for key, host in HOST.items()}
    tensors["sharded"] = put(tensors["sharded"], mesh((4, 2)), ("a", "b"))
    writer = xc.ShardWriter(path, threads=2, sync=False, **options)
    xc.save({"model": tensors, **OBJECTS}, storage_writer=writer)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint with several data files. A test that changes it changes it back."""
    files = files_of(save(tmp_path_factory.mktemp("saved") / "checkpoint"))
    assert len(files.data) == 3 and {item.key for item in files.items} == KEYS
    yield files
    report = xc.verify(files.path)
    assert report.ok and report.keys == () and report.checked_by == "xxh3_64", report


@pytest.fixture
def copy(files, tmp_path):
    """A copy of the checkpoint, which a test may damage."""
    return files_of(shutil.copytree(files.path, tmp_path / "checkpoint"))


@contextlib.contextmanager
def flipped(path, position, bit):
    def flip():
        with open(path, "r+b", buffering=0) as file:
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 1 << bit]))

    flip()
    try:
        yield
    finally:
        flip()


def load_errors(path, **options):
    """Load everything. Return the error that reports damage, or None if every bit came back."""
    state = target()
    try:
        xc.load(state, path, **options)
    except xc.CorruptCheckpointError as error:
        assert error.damages, f"an error without damages: {error}"
        return error
    assert is_whole(state), "the loaded values are not the saved ones"
    return None


def spots(files, region):
    """All byte ranges of a kind, as (file, start, stop)."""
    if region in ("manifest", "manifest's last line"):
        size, last = files.size(files.manifest), len('\n"xxh3_64": "0123456789abcdef"}')
        return [(files.manifest, *((0, size - last) if region == "manifest" else (size - last, size)))]
    if region in (".metadata", ".metadata's last line"):
        size = files.size(".metadata")
        return [(".metadata", *((0, size - SEAL) if region == ".metadata" else (size - SEAL, size)))]
    found = []
    for item in files.items:
        data = item.length if item.data is None else item.data
        stretches = {
            "objects": (0, item.length if item.data is None else 0),
            "heads": (0, 0 if item.data is None else item.data),
            "tensors": (data, data + item.nbytes),
            "tails": (data + item.nbytes, item.length),
            "paddings": (item.length, item.end - item.offset),
        }
        start, stop = stretches[region]
        if start < stop:
            found.append((item.file, item.offset + start, item.offset + stop))
    return found


FLIPS = {
    "heads": 60,
    "tensors": 100,
    "tails": 60,
    "paddings": 50,
    "objects": 50,
    "manifest": 60,
    "manifest's last line": 31,
    ".metadata": 60,
    ".metadata's last line": SEAL,
}


@pytest.mark.slow
@pytest.mark.parametrize("region", FLIPS)
def test_verify_and_load_name_the_place_of_a_flipped_bit(files, region):
    chance = random.Random(region)
    where = spots(files, region)
    sampled = []
    if "last line" in region:  # every byte of it
        ((name, start, stop),) = where
        sampled = [(name, position) for position in range(start, stop)]
        assert len(sampled) == FLIPS[region]
    for number in range(FLIPS[region] - len(sampled)):  # every range once before any range a second time
        name, start, stop = where[number % len(where)]
        sampled.append((name, chance.randrange(start, stop)))
    wrong = []
    for name, position in sampled:
        bit = chance.randrange(8)
        with flipped(files.path / name, position, bit):
            item = files.item_at(name, position) if name in files.data else None
            keys = {item.key} if item else KEYS
            here = f"bit {bit} of byte {position} of {name}"
            report = xc.verify(files.path)
            if len(report.damages) != 1 or set(report.keys) != keys or not covers(report.damages, name, position, keys):
                wrong.append(f"{here}, {sorted(keys)}: verify says {report}")
            error = load_errors(files.path)
            if error is None:
                if item is None or item.is_needed(position):
                    wrong.append(f"{here}: load says nothing")
            elif not covers(error.damages, name, position, keys if item else None) or name not in str(error):
                wrong.append(f"{here}, {sorted(keys)}: load says {error}")
    assert not wrong, f"{len(wrong)} of {len(sampled)}:\n" + "\n".join(wrong[:5])


def covers(damages, name, position, keys=None):
    """Whether the damages include this position, and name no other file."""
    return {damage.file for damage in damages} == {name} and any(
        damage.start <= position < damage.stop and keys in (None, set(damage.keys)) for damage in damages
    )


def test_more_than_three_hundred_positions_are_sampled():
    assert sum(FLIPS.values()) > 300


def cuts(size):
    return sorted({0, 1, 63, 64, size // 3, size // 2, size - 4096, size - 65, size - 64, size - 1} & set(range(size)))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["data 0", "data 1", "manifest", ".metadata"])
def test_a_truncated_file_is_reported_with_its_keys(copy, which):
    name = {"data 0": copy.data[0], "data 1": copy.data[1], "manifest": copy.manifest}.get(which, ".metadata")
    whole = (copy.path / name).read_bytes()
    edges = [edge for item in copy.items if item.file == name for edge in (item.offset, item.offset + 5 * BLOCK // 4)]
    if name == ".metadata":
        edges = range(len(whole) - SEAL - 2, len(whole))
    for length in sorted({*cuts(len(whole)), *(edge for edge in edges if edge < len(whole))}):
        (copy.path / name).write_bytes(whole[:length])
        report = xc.verify(copy.path)
        lost = {item.key for item in copy.items if item.file == name and item.end > length}
        expected = KEYS if name not in copy.data else lost
        # A pickle that ends early does not tell the keys, unless the manifest can still be found.
        unknown = name == ".metadata" and length < len(whole) - SEAL
        assert not report.ok and {damage.file for damage in report.damages} == {name}, (length, report)
        assert set(report.keys) == expected or (unknown and not report.keys), (length, report)
        error = load_errors(copy.path)
        needed = any(item.file == name and length < item.end and item.is_needed(item.end - 1) for item in copy.items)
        if error is not None:
            assert {damage.file for damage in error.damages} == {name}, (length, error)
        assert error is not None or (name in copy.data and not needed), f"cut to {length} bytes and loaded"


@pytest.mark.parametrize("what", ["missing", "empty"])
@pytest.mark.parametrize("which", ["data 0", "data 1", "manifest"])
def test_a_missing_or_empty_file_is_reported_with_its_keys(copy, which, what):
    name = {"data 0": copy.data[0], "data 1": copy.data[1]}.get(which, copy.manifest)
    (copy.path / name).unlink() if what == "missing" else (copy.path / name).write_bytes(b"")
    report = xc.verify(copy.path)
    keys = {item.key for item in copy.items if item.file == name} or KEYS
    assert set(report.keys) == keys and {damage.file for damage in report.damages} == {name}, report
    error = load_errors(copy.path)
    assert {damage.file for damage in error.damages} == {name}
    if name in copy.data:
        assert {key for damage in error.damages for key in damage.keys} <= keys
    if what == "missing":
        assert "missing" in str(report) and "missing" in str(error)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["pipe", "socket", "device", "folder", "link to itself"])
@pytest.mark.parametrize("which", ["data 0", "manifest", ".metadata"])
def test_a_pipe_socket_or_folder_in_place_of_a_file_is_reported_without_blocking(copy, which, what, tmp_path):
    name = {"data 0": copy.data[0], "manifest": copy.manifest}.get(which, which)
    path = copy.path / name
    path.unlink()
    if what == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(tmp_path / "s"))
        (tmp_path / "s").rename(path)
    else:
        make = {"pipe": os.mkfifo, "device": lambda _: path.symlink_to("/dev/zero"), "folder": os.mkdir}
        make.get(what, lambda _: path.symlink_to(name))(path)
    if (which, what) == (".metadata", "link to itself"):
        with pytest.raises(xc.CheckpointError, match="there is no checkpoint"):
            xc.verify(copy.path)
        with pytest.raises(xc.CheckpointError, match="there is no checkpoint"):
            xc.load(target(), copy.path)
        return
    report = xc.verify(copy.path)
    assert {damage.file for damage in report.damages} == {name}, report
    assert {damage.file for damage in load_errors(copy.path).damages} == {name}


def test_a_folder_without_metadata_holds_no_checkpoint(copy):
    (copy.path / ".metadata").unlink()
    for read in (lambda: xc.verify(copy.path), lambda: xc.load(target(), copy.path)):
        with pytest.raises(xc.CheckpointError, match=r"there is no checkpoint in .*no \.metadata"):
            read()


def test_empty_metadata_is_reported(copy):
    (copy.path / ".metadata").write_bytes(b"")
    assert {damage.file for damage in xc.verify(copy.path).damages} == {".metadata"}
    assert {damage.file for damage in load_errors(copy.path).damages} == {".metadata"}


def test_swapped_data_files_are_reported(copy):
    contents = [(copy.path / name).read_bytes() for name in copy.data]
    for name, content in zip(copy.data, [*contents[1:], contents[0]]):
        (copy.path / name).write_bytes(content)
    report = xc.verify(copy.path)
    assert {damage.file for damage in report.damages} == set(copy.data) and set(report.keys) == KEYS
    assert load_errors(copy.path) is not None


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A checkpoint of the same state with other values."""
    return files_of(save(tmp_path_factory.mktemp("other") / "checkpoint", by=-1))


def test_the_manifest_of_another_checkpoint_is_reported(copy, other):
    (copy.path / copy.manifest).write_bytes((other.path / other.manifest).read_bytes())
    report = xc.verify(copy.path)
    assert {damage.file for damage in report.damages} == {copy.manifest} and set(report.keys) == KEYS
    assert {damage.file for damage in load_errors(copy.path).damages} == {copy.manifest}


def test_metadata_of_another_checkpoint_is_reported(copy, other):
    (copy.path / ".metadata").write_bytes((other.path / ".metadata").read_bytes())
    report = xc.verify(copy.path)
    assert not report.ok and set(report.keys) == KEYS
    assert load_errors(copy.path) is not None


@pytest.mark.parametrize("both", [("data", "data"), ("manifest", "data"), ("manifest", "metadata")], ids=str)
def test_files_mixed_from_two_checkpoints_are_reported(copy, other, both):
    """Each file is undamaged, but the files do not belong together."""
    if "data" in both:
        shutil.copyfile(other.path / other.data[0], copy.path / copy.data[0])
    if "manifest" in both:
        shutil.copyfile(other.path / other.manifest, copy.path / other.manifest)
        (copy.path / copy.manifest).unlink()
    if "metadata" in both:
        shutil.copyfile(other.path / ".metadata", copy.path / ".metadata")
    assert not xc.verify(copy.path).ok
    assert load_errors(copy.path) is not None


@pytest.mark.parametrize("added", [1, 64, 5000])
@pytest.mark.parametrize("which", ["data", "manifest", ".metadata"])
def test_appended_bytes_are_reported(copy, which, added):
    name = {"data": copy.data[0], "manifest": copy.manifest}.get(which, ".metadata")
    before = copy.size(name)
    with open(copy.path / name, "ab") as file:
        file.write(bytes(added))
    (damage,) = xc.verify(copy.path).damages
    assert damage.file == name and damage.start <= before < damage.stop == before + added
    error = load_errors(copy.path)
    assert error is None if which == "data" else error.damages[0].file == name


def test_each_of_several_damages_is_reported(files):
    chosen = [next(item for item in files.items if item.key == key) for key in ("model.small", "model.large", "step")]
    positions = [(item.file, item.offset + item.length // 2, item.key) for item in chosen]
    with contextlib.ExitStack() as stack:
        for name, position, _ in positions:
            stack.enter_context(flipped(files.path / name, position, 3))
        report = xc.verify(files.path)
    assert set(report.keys) == {key for _, _, key in positions} and len(report.damages) == 3
    for name, position, key in positions:
        assert any(d.file == name and d.start <= position < d.stop and d.keys == (key,) for d in report.damages)
        assert f"'{key}': {name}, bytes " in str(report)
    assert str(report).count("\n") == 3 and "DAMAGED" in str(report)


def test_a_verify_report_is_false_if_the_checkpoint_is_damaged(files, tmp_path):
    assert bool(xc.verify(files.path)) is xc.verify(files.path).ok is True
    item = next(item for item in files.items if item.key == "model.small")
    with flipped(files.path / item.file, item.offset + item.data, 0):
        damaged = xc.verify(files.path)
    assert bool(damaged) is damaged.ok is False and damaged.damages
    incomplete = dataclasses.replace(damaged, damages=(), incomplete={"t": "[0:1) is missing"})
    assert bool(incomplete) is incomplete.ok is False


def test_only_the_damaged_block_is_reported(files):
    item = next(item for item in files.items if item.key == "model.large")
    with flipped(files.path / item.file, item.offset + BLOCK + 5, 0):
        (damage,) = xc.verify(files.path).damages
    assert (damage.start, damage.stop) == (item.offset + BLOCK, item.offset + 2 * BLOCK)


def test_verify_false_loads_everything_but_the_flipped_bit(files):
    item = next(item for item in files.items if item.key == "model.rows")
    state = target()
    with flipped(files.path / item.file, item.offset + item.data + 1001, 6):
        xc.load(state, files.path, verify=False)
    found, expected = (t.view(torch.uint8).reshape(-1) for t in (state["model"].pop("rows"), HOST["rows"]))
    assert torch.equal(found[:1001], expected[:1001]) and torch.equal(found[1002:], expected[1002:])
    assert found[1001] == expected[1001] ^ (1 << 6) and is_whole(state)


@pytest.mark.parametrize("which", ["manifest", "manifest, missing", ".metadata", ".metadata's last line"])
def test_verify_false_loads_if_only_metadata_or_only_the_manifest_is_damaged(copy, which, caplog):
    if which == "manifest, missing":
        (copy.path / copy.manifest).unlink()
    else:
        name = copy.manifest if which == "manifest" else ".metadata"
        data = bytearray((copy.path / name).read_bytes())
        data[{"manifest": 300, ".metadata": 150, ".metadata's last line": -5}[which]] ^= 1
        (copy.path / name).write_bytes(data)
    assert load_errors(copy.path) is not None
    assert load_errors(copy.path, verify=False) is None
    if "manifest" in which:
        assert copy.manifest in caplog.text


def test_verify_false_still_reports_a_file_that_ends_early(copy):
    item = max((item for item in copy.items if item.file == copy.data[0]), key=lambda item: item.end)
    with open(copy.path / item.file, "r+b") as file:
        file.truncate(item.offset + (item.data or 0) + 1)
    error = load_errors(copy.path, verify=False)
    assert error.damages[0].file == item.file and error.damages[0].keys == (item.key,)


@pytest.mark.parametrize("damaged", ["small", "large", "sharded", "step"])
def test_a_load_that_needs_no_damaged_bytes_succeeds(files, damaged):
    key = damaged if damaged in OBJECTS else f"model.{damaged}"
    item = next(item for item in files.items if item.key == key)
    with flipped(files.path / item.file, item.offset + item.length // 2, 1):
        rest = target(({*HOST, *OBJECTS}) - {damaged})
        xc.load(rest, files.path, unexpected="ignore")
        assert is_whole(rest)
        with pytest.raises(xc.CorruptCheckpointError, match=repr(key)):
            xc.load(target((damaged,)), files.path, unexpected="ignore")


class Rows(dcp.DefaultLoadPlanner):
    """DCP's planner, changed to load only some rows of a tensor, from row ``first`` on."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def create_local_plan(self):
        ((key, part),) = self.state_dict.items()
        offsets = torch.Size((self.first, *(0 for _ in part.shape[1:])))
        wanted = [ChunkStorageMetadata(offsets, part.shape)]
        self.place = MetadataIndex(key, offsets)
        return LoadPlan(create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], wanted))

    def lookup_tensor(self, index):
        assert index == self.place
        return next(iter(self.state_dict.values()))


def load_rows(path, part, first):
    dcp.load({"model.large": part}, storage_reader=xc.ShardReader(path), planner=Rows(first))


def test_a_load_of_some_rows_fails_only_for_damage_in_their_blocks(files):
    item = next(item for item in files.items if item.key == "model.large")
    assert item.nbytes > 3 * BLOCK
    count = 1000
    for first in (0, BLOCK // 4 - 500, 2 * BLOCK // 4 + 7, LARGE - count):
        begin = item.data + first * 4
        touched = set(range(begin // BLOCK, (begin + count * 4 - 1) // BLOCK + 1))
        for block in range(4):
            part = torch.zeros(count)
            load = functools.partial(load_rows, files.path, part, first)
            with flipped(files.path / item.file, item.offset + block * BLOCK + BLOCK // 2, 5):
                if block in touched:
                    with pytest.raises(CheckpointException) as caught:
                        load()
                    (damage,) = caught.value.failures[0][0].damages
                    assert damage.start == item.offset + block * BLOCK and damage.keys == ("model.large",)
                    assert not part.any()
                else:
                    load()
                    assert same_bits(part, HOST["large"][first : first + count])


def test_dcp_load_raises_dcps_exception_with_our_cause(files):
    item = next(item for item in files.items if item.key == "model.small")
    for name, position in ((item.file, item.offset + item.data), (files.manifest, 99), (".metadata", 99)):
        with flipped(files.path / name, position, 0):
            for planner in (xc.SPMDLoadPlanner(), dcp.DefaultLoadPlanner()):
                with pytest.raises(CheckpointException) as caught:
                    dcp.load({"model": target()["model"]}, storage_reader=xc.ShardReader(files.path), planner=planner)
                cause = caught.value.failures[0][0]
                assert isinstance(cause, xc.CorruptCheckpointError) and cause.damages[0].file == name


def test_a_failed_load_onto_a_mesh_leaves_each_tensor_loaded_or_untouched(files):
    """No part of a damaged tensor may reach a device."""
    item = next(item for item in files.items if item.key == "model.sharded")
    state = {"model": {key: put(torch.zeros_like(host), mesh((2, 4)), None) for key, host in HOST.items()}}
    state["model"]["sharded"] = put(torch.zeros_like(HOST["sharded"]), mesh((2, 4)), ("b", "a"))
    damaged = flipped(files.path / item.file, item.offset + item.data, 0)
    with damaged, pytest.raises(xc.CorruptCheckpointError, match=r"'model\.sharded'"):
        xc.load(state, files.path)
    assert holds(state["model"]["sharded"], torch.zeros_like(HOST["sharded"]))
    for key, host in HOST.items():
        assert holds(state["model"][key], host) or holds(state["model"][key], torch.zeros_like(host)), key


def test_damage_behind_a_url_is_reported(files):
    """Remote folders are read by ranged requests, not by memory maps."""
    remote = fsspec.filesystem("memory")
    for name in (".metadata", files.manifest, *files.data):
        remote.pipe_file(f"/damaged/{name}", (files.path / name).read_bytes())
    assert xc.verify("memory://damaged").ok and load_errors("memory://damaged") is None
    chance = random.Random(0)
    for region in FLIPS:
        name, start, stop = chance.choice(spots(files, region))
        position = chance.randrange(start, stop)
        whole = remote.cat_file(f"/damaged/{name}")
        remote.pipe_file(f"/damaged/{name}", flip(whole, position))
        item = files.item_at(name, position) if name in files.data else None
        report, error = xc.verify("memory://damaged"), load_errors("memory://damaged")
        assert covers(report.damages, name, position, {item.key} if item else KEYS), (region, position, report)
        assert (item and not item.is_needed(position)) or covers(error.damages, name, position), (region, error)
        remote.pipe_file(f"/damaged/{name}", whole[: len(whole) // 2])
        assert not xc.verify("memory://damaged").ok and load_errors("memory://damaged") is not None
        remote.pipe_file(f"/damaged/{name}", whole)
    for name in files.data:
        remote.rm_file(f"/damaged/{name}")
        assert not xc.verify("memory://damaged").ok and "missing" in str(load_errors("memory://damaged"))
    remote.rm("/damaged", recursive=True)


def flip(data, position):
    return data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :]


@pytest.mark.parametrize("threads", [1, 3])
def test_flipped_bits_of_stock_tensors_and_objects_are_found_by_their_crc(tmp_path, threads):
    """Stock DCP writes a CRC-32 and never checks it; ``verify`` and ``load`` do."""
    state = {"model": {key: HOST[key] for key in ("rows", "small", "flags")}, **OBJECTS}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=threads))
    report = xc.verify(tmp_path)
    assert report.ok and report.checked_by == "crc32" and "all as written" in str(report)
    stored = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    chance = random.Random(threads)
    for index, place in stored.items():
        name, whole = place.relative_path, (tmp_path / place.relative_path).read_bytes()
        item = whole[place.offset : place.offset + place.length]
        if index.fqn.startswith("model."):
            raw = bytes(HOST[index.fqn[6:]].reshape(-1).view(torch.uint8).numpy())
        else:
            raw = b"\x80\x02"  # the first bytes of the pickle
        for _ in range(5):
            position = place.offset + item.index(raw) + chance.randrange(len(raw))
            (tmp_path / name).write_bytes(flip(whole, position))
            (damage,) = xc.verify(tmp_path).damages
            assert damage.file == name and damage.start <= position < damage.stop and damage.keys == (index.fqn,)
            assert "CRC-32" in damage.what
            target = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}, **OBJECTS}
            with pytest.raises(xc.CorruptCheckpointError, match="CRC-32") as caught:
                xc.load(target, tmp_path)
            assert {key for one in caught.value.damages for key in one.keys} == {index.fqn}
        (tmp_path / name).write_bytes(whole[: place.offset + place.length // 2])
        lost = {i.fqn for i, p in stored.items() if p.relative_path == name and p.offset >= place.offset}
        assert set(xc.verify(tmp_path).keys) == lost
        (tmp_path / name).unlink()
        assert set(xc.verify(tmp_path).keys) == {i.fqn for i, p in stored.items() if p.relative_path == name}
        with pytest.raises(xc.CorruptCheckpointError, match="the file is missing"):
            xc.load({"model": {key: torch.zeros_like(t) for key, t in state["model"].items()}, **OBJECTS}, tmp_path)
        (tmp_path / name).write_bytes(whole)
    assert xc.verify(tmp_path).ok


def test_a_chunk_that_no_file_holds_is_reported_as_incomplete(tmp_path):
    """Stock DCP's writer with threads can lose an item and still report success."""
    state = {"t": put(HOST["sharded"], mesh((8,)), ("a", None)), "u": torch.ones(3)}
    xc.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    stored = {index: place for index, place in metadata.storage_data.items() if index.offset != torch.Size((5, 0))}
    assert len(stored) == len(metadata.storage_data) - 1
    (tmp_path / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, storage_data=stored)))
    report = xc.verify(tmp_path)
    assert not report.ok and report.damages == () and report.keys == ("t",)
    assert "stored in no file" in report.incomplete["t"] and "'t'" in str(report)
    with pytest.raises(xc.IncompleteCheckpointError, match=r"'t'.*stored in no file"):
        xc.load({"t": torch.zeros(40, 12), "u": torch.zeros(3)}, tmp_path)
    for chunks in (metadata.state_dict_metadata["t"].chunks[1:], metadata.state_dict_metadata["t"].chunks * 2):
        tensor = dataclasses.replace(metadata.state_dict_metadata["t"], chunks=chunks)
        changed = {**metadata.state_dict_metadata, "t": tensor}
        (tmp_path / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(metadata, state_dict_metadata=changed)))
        assert xc.verify(tmp_path).keys == ("t",)


def resealed(path, edit):
    """Change the manifest of a checkpoint, and compute all checksums again."""
    data = (path / ".metadata").read_bytes()
    pickled, save_id = data[:-67], data[-67:].split()[1].decode()
    manifest = path / f"manifest-{save_id}.json"
    body = manifest.read_bytes().rpartition(b"\n")[0]
    top = json.loads(body[:-1] + b"}")
    edit(top)
    body = json.dumps(top).encode()[:-1] + b","
    manifest.write_bytes(body + b'\n"xxh3_64": "%s"}' % xxhash.xxh3_64_hexdigest(body).encode())
    line = pickled + f"\ntorch_xla_ckpt {save_id} {xxhash.xxh3_64_hexdigest(manifest.read_bytes())} ".encode()
    (path / ".metadata").write_bytes(line + xxhash.xxh3_64_hexdigest(line).encode() + b"\n")


OWNERS = {
    "two tensors with the same bytes": lambda top: top["tensors"]["b"]["chunks"][0].__setitem__(
        slice(2, 7), top["tensors"]["a"]["chunks"][0][2:7]
    ),
    "bytes of no item": lambda top: top["tensors"].pop("a"),
    "a file with another size": lambda top: top["files"][0].__setitem__(1, top["files"][0][1] + 64),
    "a file twice": lambda top: top["files"].append(top["files"][0]),
}


@pytest.mark.parametrize("how", OWNERS)
def test_a_manifest_whose_items_share_or_leave_out_bytes_is_refused(how, tmp_path):
    path = tmp_path / "checkpoint"
    xc.save({"a": torch.arange(64.0), "b": torch.arange(64.0) + 100, "o": 7}, path, sync=False)
    resealed(path, lambda top: None)
    xc.load({"a": torch.zeros(64), "b": torch.zeros(64), "o": 0}, path)
    resealed(path, OWNERS[how])
    with pytest.raises(xc.CorruptCheckpointError):
        xc.load({"b": torch.zeros(64)}, path)
    assert not xc.verify(path).ok


def test_tensors_without_checksums_are_reported_as_unchecked(tmp_path, caplog):
    path = tmp_path / "checkpoint"
    saved = torch.arange(64.0)
    xc.save({"a": saved, "o": [1, 2]}, path, sync=False)
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-67])
    next(path.glob("manifest-*")).unlink()
    data = next(path.glob("*.distcp"))
    raw = bytearray(data.read_bytes())
    raw[raw.index(saved.numpy().tobytes()) + 40] ^= 0x40
    data.write_bytes(raw)
    report = xc.verify(path)
    assert report.unchecked == ("a",) and report.bytes_unchecked == 256
    assert "NOT CHECKED" in str(report) and "'a'" in str(report) and "all as written" not in str(report)
    caplog.clear()
    xc.load({"a": torch.zeros(64)}, path)
    assert "its manifest is missing" in caplog.text


@pytest.mark.parametrize("name", ["a\ud800", "a" * 5000])
def test_impossible_file_names_are_reported_as_missing_files(tmp_path, name):
    path = tmp_path / "checkpoint"
    xc.save({"a": torch.arange(64.0)}, path, sync=False)
    resealed(path, lambda top: top["files"][0].__setitem__(0, name))
    stock = tmp_path / "stock"
    dcp.save({"a": torch.arange(64.0)}, checkpoint_id=stock)
    edited(stock, relative_path=name)
    for one in (path, stock):
        report = xc.verify(one)
        assert not report.ok and report.keys == ("a",) and "missing" in str(report)
        str(report).encode()
        with pytest.raises(xc.CorruptCheckpointError, match="the file is missing") as caught:
            xc.load({"a": torch.zeros(64)}, one)
        str(caught.value).encode()


@pytest.mark.parametrize("number", ["offset", "length"])
def test_impossible_offsets_in_stock_metadata_are_reported(tmp_path, number):
    """Python refuses to print integers of more than 4300 digits."""
    dcp.save({"a": torch.arange(64.0)}, checkpoint_id=tmp_path)
    edited(tmp_path, **{number: 1 << 50_000})
    assert not xc.verify(tmp_path).ok
    with pytest.raises(xc.CorruptCheckpointError, match=r"\.metadata"):
        xc.load({"a": torch.zeros(64)}, tmp_path)


def edited(stock, **places):
    """Change the places of all items in the metadata of a stock checkpoint."""
    metadata = dcp.FileSystemReader(stock).read_metadata()
    for place in metadata.storage_data.values():
        vars(place).update(places)
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))


def test_verify_reports_a_folder_in_place_of_a_file_and_impossible_lengths(tmp_path):
    path = tmp_path / "checkpoint"
    xc.save({"a": torch.arange(64.0)}, path, sync=False)
    data = next(path.glob("*.distcp"))
    data.unlink()
    data.mkdir()
    report = xc.verify(path)
    assert not report.ok and report.keys == ("a",) and "folder" in str(report)
    stock = tmp_path / "stock"
    dcp.save({"a": torch.arange(64.0)}, checkpoint_id=stock)
    metadata = dcp.FileSystemReader(stock).read_metadata()
    for place in metadata.storage_data.values():
        place.length = 1 << 62
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))
    report = xc.verify(stock)
    assert not report.ok and report.keys == ("a",) and "the file ends before" in str(report)


@pytest.mark.parametrize("source", ["stock", "model.pt"])
def test_copies_of_damaged_bytes_are_refused(tmp_path, source):
    """A copy has checksums of its own, which would hide the damage."""
    state = {"model": {"rows": HOST["rows"]}}
    path = tmp_path / source
    if source == "stock":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
        (file,) = path.glob("*.distcp")
    else:
        torch.save(state, path)
        file = path
    whole = file.read_bytes()
    raw = bytes(HOST["rows"].reshape(-1).view(torch.uint8).numpy())
    file.write_bytes(flip(whole, whole.index(raw) + len(raw) // 2))
    with pytest.raises(xc.CorruptCheckpointError, match="CRC-32"):
        xc.export(path, tmp_path / "exported")
    with pytest.raises(xc.CorruptCheckpointError, match="CRC-32"):
        inspecting.convert(path, tmp_path / "converted")
    assert sorted(one.name for one in tmp_path.iterdir()) == [source]

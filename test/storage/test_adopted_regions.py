"""Boxes that are parts of a saved chunk go to their devices from the memory map, whatever their layout in the file."""

import json
import os
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

import torch_xla_ckpt as xc
from support.mapped import watch_puts
from support.meshes import holds, mesh, put, random_bits, same_bits, settle
from torch_xla_ckpt.storage import chunk_bytes, ranges
from torch_xla_ckpt.storage.read_plan import ItemRead

SPECS = [("a", None), (None, "a"), ("a", "b"), (("b", "a"), None), (None, ("a", "b"))]
SHAPE = (1024, 2048)  # of elements of one byte: each device has 256 KiB, the smallest dtype included


@pytest.fixture
def handed(monkeypatch):
    """For each shard that was put on a device, the file in whose memory map the shard lies."""
    return watch_puts(monkeypatch)


def on_devices(host, spec):
    return put(torch.zeros_like(host), mesh((4, 2)), spec)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("writer", ["safetensors", "ours"])
def test_rows_columns_and_tiles_are_put_on_their_devices_without_a_copy(tmp_path, handed, spec, writer):
    host = random_bits(SHAPE, torch.float32)
    path = tmp_path / "m.safetensors" if writer == "safetensors" else tmp_path
    save_file({"t": host}, path) if writer == "safetensors" else xc.save({"t": host}, path)
    target = {"t": on_devices(host, spec)}
    report = xc.load(target, path)
    assert len(handed) == 8 and all(name.startswith(str(path)) for name in handed), handed
    assert holds(target["t"], host)
    assert report.bytes_needed == host.nbytes
    assert writer == "ours" or report.bytes_read == host.nbytes


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.int64, torch.float64, torch.float8_e5m2],
    ids=str,
)
def test_strided_boxes_of_every_width_keep_their_bits(tmp_path, handed, dtype):
    state = {"columns": random_bits(SHAPE, dtype), "4-d": random_bits((16, 64, 8, 256), dtype, seed=1)}
    save_file(state, tmp_path / "m.safetensors")
    target = {
        "columns": on_devices(state["columns"], (None, ("a", "b"))),
        "4-d": on_devices(state["4-d"], (None, "a", None, "b")),
    }
    xc.load(target, tmp_path / "m.safetensors")
    assert handed == [str(tmp_path / "m.safetensors")] * 16
    assert all(holds(target[key], value) for key, value in state.items())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_strided_boxes_of_complex_tensors_keep_their_bits(tmp_path, dtype):
    host = torch.complex(torch.randn(512, 512, dtype=torch.float64), torch.randn(512, 512, dtype=torch.float64))
    host = host.to(dtype)
    xc.save({"t": host}, tmp_path)
    target = {"t": on_devices(host, (None, "a"))}
    xc.load(target, tmp_path)
    assert holds(target["t"], host)


def test_boxes_with_padding_and_empty_ones_get_buffers(tmp_path, handed):
    host = random_bits((1001, 2047), torch.float32)
    odd = {"few": random_bits((3, 1 << 16), torch.float32), "0-d": torch.tensor(7.0), "empty": torch.empty(0, 5)}
    save_file({"t": host, **odd}, tmp_path / "m.safetensors")
    target = {
        "t": on_devices(host, ("a", "b")),
        "few": on_devices(odd["few"], (("a", "b"), None)),  # five of eight devices have no row
        "0-d": torch.zeros(()),
        "empty": torch.zeros(0, 5),
    }
    xc.load(target, tmp_path / "m.safetensors")
    assert holds(target["t"], host) and holds(target["few"], odd["few"])
    assert target["0-d"] == 7 and "" in handed and str(tmp_path / "m.safetensors") in handed


def test_elements_that_are_not_aligned_are_copied(tmp_path, handed):
    host = random_bits(SHAPE, torch.float32)
    head = json.dumps(
        {
            "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "t": {"dtype": "F32", "shape": list(SHAPE), "data_offsets": [3, 3 + host.nbytes]},
        }
    ).encode()
    head += b" " * (-len(head) % 8)
    data = len(head).to_bytes(8, "little") + head + b"abc" + bytes(host.view(torch.uint8).numpy())
    (tmp_path / "m.safetensors").write_bytes(data)
    target = {"t": on_devices(host, (None, "a")), "odd": torch.zeros(3, dtype=torch.uint8)}
    xc.load(target, tmp_path / "m.safetensors")
    assert len(handed) == 8 and str(tmp_path / "m.safetensors") not in handed
    assert holds(target["t"], host) and target["odd"].tolist() == list(b"abc")


def test_a_cast_reads_into_buffers(tmp_path, handed):
    host = random_bits(SHAPE, torch.bfloat16).nan_to_num(1.0)
    save_file({"t": host}, tmp_path / "m.safetensors")
    target = {"t": on_devices(host.float(), (None, "a"))}
    xc.load(target, tmp_path / "m.safetensors")
    assert str(tmp_path / "m.safetensors") not in handed and holds(target["t"], host.float())


def test_two_names_of_one_saved_tensor_get_tensors_of_their_own(tmp_path):
    host = random_bits(SHAPE, torch.int32)
    save_file({"t": host}, tmp_path / "m.safetensors")
    target = {"a": on_devices(host, (None, "a")), "b": on_devices(host, ("a", "b")), "c": torch.zeros_like(host)}
    xc.load(target, tmp_path / "m.safetensors", rename={"t": ["a", "b", "c"]})
    target["a"].add_(1)
    target["c"].add_(2)
    settle()
    assert holds(target["a"], host + 1) and holds(target["b"], host) and same_bits(target["c"], host + 2)


def test_tied_keys_with_strided_boxes_get_the_last_value_and_a_warning(tmp_path, caplog):
    one, other = (random_bits(SHAPE, torch.int32, seed=n) for n in (1, 2))
    save_file({"one": one, "other": other}, tmp_path / "m.safetensors")
    shared = on_devices(one, (None, "a"))
    xc.load({"one": shared, "other": shared}, tmp_path / "m.safetensors")
    assert holds(shared, other) and "share one tensor" in caplog.text
    caplog.clear()
    xc.load({"one": shared, "other": shared}, tmp_path / "m.safetensors", rename={"one": ["one", "other"]}, only="one")
    assert holds(shared, one) and "share one tensor" not in caplog.text


def test_loaded_tensors_do_not_change_when_their_file_is_overwritten_or_removed(tmp_path):
    state = {str(spec): random_bits(SHAPE, torch.int32, seed=n) for n, spec in enumerate(SPECS)}
    path = tmp_path / "m.safetensors"
    save_file(state, path)
    before = path.read_bytes()
    target = {key: on_devices(state[key], spec) for key, spec in zip(state, SPECS)}
    xc.load(target, path)
    with open(path, "r+b") as file:
        file.write(bytes(len(before)))
    assert all(holds(target[key], value) for key, value in state.items())
    path.write_bytes(before)
    for value in target.values():
        value.add_(1)
    settle()
    assert path.read_bytes() == before, "a change of a loaded tensor reached the file"
    shutil.rmtree(tmp_path)
    assert all(holds(target[key], value + 1) for key, value in state.items())


def test_damage_is_found_before_a_part_of_a_chunk_is_put_on_a_device(tmp_path, handed):
    host = random_bits(SHAPE, torch.int32)
    xc.save({"t": host}, tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    with open(file, "r+b") as opened:
        opened.seek(host.nbytes // 2)
        opened.write(b"\0damaged")
    target = {"t": on_devices(host, (None, "a"))}
    with pytest.raises(xc.CorruptCheckpointError):
        xc.load(target, tmp_path)
    assert not handed and holds(target["t"], torch.zeros_like(host))
    xc.load(target, tmp_path, verify=False)
    assert handed == [str(file)] * 8


def test_a_file_that_became_shorter_after_its_header_was_read_is_an_error(tmp_path):
    path = tmp_path / "m.safetensors"
    host = random_bits(SHAPE, torch.int32)
    save_file({"t": host}, path)
    reader = xc.ShardReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    os.truncate(path, path.stat().st_size - 1)
    item = ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex("t", torch.Size((0, 0))),
        torch.Size((0, 0)),
        MetadataIndex("t", torch.Size((0, 0))),
        torch.Size((0, 1024)),
        torch.Size((1024, 1024)),
    )

    class NoElements:
        def take(self, read_item, elements):
            raise AssertionError("elements of a file that is too short")

        def buffer_bytes(self, key):
            return 0

    with pytest.raises(xc.CorruptCheckpointError, match="ends before these bytes"):
        reader.read_elements([item], NoElements())


def test_a_part_of_a_chunk_in_ordinary_memory_is_copied_because_it_would_keep_all_of_it(tmp_path):
    host = random_bits(SHAPE, torch.int32)
    save_file({"t": host}, tmp_path / "m.safetensors")
    reader = xc.ShardReader(tmp_path / "m.safetensors")
    metadata = reader.read_metadata()
    (saved,) = metadata.state_dict_metadata.values()
    index = MetadataIndex("t", torch.Size((0, 0)))
    item = ItemRead("t", None, saved, torch.Size(SHAPE))
    chunk = chunk_bytes.ChunkBytes(item, memoryview(bytearray(host.numpy().tobytes())), 0)

    def read(rows):
        lengths = torch.Size((rows, SHAPE[1]))
        return ReadItem(LoadItemType.TENSOR, index, torch.Size((0, 0)), index, torch.Size((0, 0)), lengths)

    assert chunk.tensor(read(512)) is None
    assert same_bits(chunk.tensor(read(1024)), host)


spans = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20)), min_size=1, max_size=30)


@given(st.lists(spans, min_size=1, max_size=6), st.integers(0, 5))
def test_many_ranges_are_merged_like_few(lists, gap):
    found = [[(start, start + length) for start, length in one] for one in lists]
    rows = [torch.tensor(one).numpy() for one in found]
    expected = ranges.merged([span for one in found for span in one], gap)
    with pytest.MonkeyPatch.context() as patched:
        for many in (0, 1000):
            patched.setattr(ranges, "_MANY", many)
            assert ranges.merged_rows(rows, gap) == expected

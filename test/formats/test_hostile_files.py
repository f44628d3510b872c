"""Headers, indices and archives of others are untrusted: hostile ones raise an error and claim no memory."""

import json
import resource
import struct

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import torch_xla_ckpt as xc

F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def write(path, header, data=bytes(16), length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def refused(path, match, error=xc.CheckpointError):
    """Every way to read the file raises the same error, and the target is unchanged."""
    target = {"a": torch.full((4,), 7.0)}
    with pytest.raises(error, match=match):
        xc.load(target, path)
    assert target["a"].tolist() == [7.0] * 4 and list(target) == ["a"]


HEADERS = {
    "a tensor that ends behind the file": (
        {"a": {**F32, "shape": [5], "data_offsets": [0, 20]}},
        "outside of the file",
    ),
    "a tensor before the data": ({"a": {**F32, "data_offsets": [-16, 0]}}, "outside of the file"),
    "offsets in the wrong order": ({"a": {**F32, "data_offsets": [16, 0]}}, "outside of the file"),
    "an offset that is no integer": ({"a": {**F32, "data_offsets": [0, 16.0]}}, "outside of the file"),
    "an offset of true": ({"a": {**F32, "data_offsets": [False, 16]}}, "outside of the file"),
    "a shape that needs an exabyte": ({"a": {**F32, "shape": [1 << 30, 1 << 30]}}, "does not have 16 bytes"),
    "a shape whose size overflows": ({"a": {**F32, "shape": [1 << 62] * 8}}, "does not have 16 bytes"),
    "a shape with a huge number": ({"a": {**F32, "shape": [1 << 200]}}, "outside of the file"),
    "a negative shape": ({"a": {**F32, "shape": [-4]}}, "outside of the file"),
    "a shape of another size": ({"a": {**F32, "shape": [3]}}, "does not have 16 bytes"),
    "a thousand dimensions": ({"a": {**F32, "shape": [1] * 1000}}, "outside of the file"),
    "two tensors in the same bytes": ({"a": F32, "b": F32}, "overlap"),
    "bytes of no tensor": ({"a": {**F32, "shape": [2], "data_offsets": [8, 16]}}, "belong to no tensor"),
    "bytes behind the last tensor": ({"a": {**F32, "shape": [2], "data_offsets": [0, 8]}}, "before the end"),
    "an unknown dtype": ({"a": {**F32, "dtype": "F6_E2M3"}}, "dtypes that this package.*F6_E2M3.*Convert"),
    "a dtype that is a list": ({"a": {**F32, "dtype": ["F32"]}}, "dtypes that this package does not read"),
    "an entry without offsets": ({"a": {"dtype": "F32", "shape": [4]}}, "incomplete"),
    "an entry that is a text": ({"a": "F32"}, "incomplete"),
    "a header that is a list": (b"[1, 2]", "no JSON object"),
    "a header that is no JSON": (b"{nonsense", "no JSON"),
    "a header that is nested too deep": (b"[" * 100_000, "no JSON"),
    "a header that is no UTF-8": (b'{"\xff\xff": 1}', "no JSON"),
    "a number of a million digits": (b'{"a": ' + b"9" * 1_000_000 + b"}", "no JSON"),
    "an empty shape that torch cannot have": (
        {"a": {**F32, "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}, "b": F32},
        "does not have 0 bytes",
    ),
    "half of a surrogate pair": (b'{"\\ud800": %s}' % json.dumps(F32).encode(), "is no text"),
    "no number": (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 16]}}', "outside of the file"),
    "an offset of infinity": (
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, Infinity]}}',
        "outside of the",
    ),
    "an offset of a float": (
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1.6e1]}}',
        "outside of the file",
    ),
    "metadata twice": (b'{"__metadata__": {"a": "b", "a": "c"}, "a": %s}' % json.dumps(F32).encode(), "occurs twice"),
    "a name twice": (b'{"a": %s, "a": %s}' % (json.dumps(F32).encode(), json.dumps(F32).encode()), "occurs twice"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_header_is_refused(tmp_path, name):
    header, match = HEADERS[name]
    write(tmp_path / "model.safetensors", header)
    refused(tmp_path, match)
    refused(tmp_path / "model.safetensors", match)
    if "dtypes" not in match:
        report = xc.verify(tmp_path)
        assert not report and report.damages[0].file == "model.safetensors"


@pytest.mark.parametrize("length", [17, 1 << 20, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_header_length_beyond_the_file_claims_no_memory(tmp_path, length):
    write(tmp_path / "model.safetensors", b"{}", b"", length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(tmp_path, "claim a header", xc.CorruptCheckpointError)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("size", range(8))
def test_file_shorter_than_a_header_is_refused(tmp_path, size):
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    refused(tmp_path, "at least 8 bytes")


@pytest.mark.slow
@settings(max_examples=150)
@given(seed=st.binary(min_size=8, max_size=8), data=st.data())
def test_mutated_file_is_read_or_refused_and_never_crashes(tmp_path_factory, seed, data):
    path = tmp_path_factory.mktemp("mutated") / "model.safetensors"
    save_file({"a": torch.arange(4.0), "b": torch.zeros(2, 2, dtype=torch.int8)}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if seed[0] % 3 == 0 else raw)
    target = {"a": torch.zeros(4)}
    try:
        xc.load(target, path, unexpected="ignore")
    except xc.CheckpointError:
        return
    assert target["a"].shape == (4,)


def indexed(folder, weight_map, **files):
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../x", "", "C:\\x", "x\0y"])
def test_index_cannot_name_a_file_outside_of_the_folder(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(4)}, tmp_path / "secret.safetensors")
    indexed(folder, {"a": name})
    refused(folder, "outside of its folder", xc.UnsafeObjectError)


@pytest.mark.parametrize("raw", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000, "\xff"])
def test_index_that_is_none_is_refused(tmp_path, raw):
    (tmp_path / "model.safetensors.index.json").write_bytes(raw.encode("latin-1"))
    refused(tmp_path, "no index", xc.CorruptCheckpointError)


def test_index_and_files_that_do_not_belong_together_are_named(tmp_path):
    indexed(tmp_path, {"a": "one.safetensors", "lost": "one.safetensors"}, one={"a": torch.zeros(4)})
    refused(tmp_path, "lost", xc.IncompleteCheckpointError)
    indexed(tmp_path, {"a": "one.safetensors", "b": "gone.safetensors"})
    refused(tmp_path, "lacks files.*gone", xc.IncompleteCheckpointError)
    assert not xc.verify(tmp_path)


def test_missing_file_of_a_set_without_an_index_is_named(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / "model-00001-of-00002.safetensors")
    refused(tmp_path, "File 2 is missing", xc.IncompleteCheckpointError)


def test_name_in_two_files_is_refused(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(4)}, tmp_path / "two.safetensors")
    refused(tmp_path, "twice: in one.safetensors and in two.safetensors")


class Evil:
    def __reduce__(self):
        return print, ("code from the file ran",)


def test_torch_file_runs_no_code(tmp_path, capsys):
    torch.save({"a": torch.zeros(4), "evil": Evil()}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "could run code.*print", xc.UnsafeObjectError)
    assert "ran" not in capsys.readouterr().out


def test_torch_file_of_a_tensor_that_repeats_itself_claims_no_memory(tmp_path):
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "repeats its elements")


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True])
def test_torch_file_with_many_views_claims_no_memory(tmp_path, remote):
    """A thousand copies of one tensor would take a thousand times the memory of the file."""
    base = torch.zeros(1 << 10, 1 << 11)
    for number, state in enumerate(({n: base.t() for n in range(1000)}, {n: (base, n) for n in range(1000)})):
        torch.save(state | {"a": torch.zeros(4)}, tmp_path / f"{number}.pt")
        path = f"{tmp_path}/{number}.pt"
        if remote:
            path = f"memory://{tmp_path}/{number}.pt"
            fsspec.filesystem("memory").pipe_file(path, (tmp_path / f"{number}.pt").read_bytes())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refused(path, "repeats its elements")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10
        fsspec.filesystem("memory").store.clear()


def test_torch_file_with_half_of_a_surrogate_pair_as_a_name_is_refused(tmp_path):
    torch.save({"\ud800": torch.zeros(4), "a": torch.zeros(4)}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "is no text")


@pytest.mark.parametrize("old", [True, False], ids=["before torch 1.6", "cut off"])
def test_torch_file_that_is_no_archive_is_refused(tmp_path, old):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(4)}, path, _use_new_zipfile_serialization=not old)
    if not old:
        path.write_bytes(path.read_bytes()[:-30])
    refused(path, "before torch 1.6" if old else "no archive")


def test_file_of_unknown_content_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"#!/bin/sh\necho this is a script, and no model at all\n")
    refused(tmp_path / "model.bin", "claim a header", xc.CorruptCheckpointError)


def test_files_that_are_whole_are_read_as_the_library_reads_them(tmp_path):
    """The counterpart: the checks above refuse nothing that is right."""
    tensors = {f"t{n}": torch.randn(n, 3) for n in range(5)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"any": "text"})
    target = {key: torch.zeros_like(value) for key, value in tensors.items()}
    xc.load(target, tmp_path)
    assert all(torch.equal(target[key], value) for key, value in load_file(tmp_path / "model.safetensors").items())

"""Headers of exported safetensors files: their texts come along, and no reader refuses them for their size."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import torch_xla_ckpt as xc
from support.exported import assert_same, written
from torch_xla_ckpt.exchange import layout

TEXTS = {"format": "pt", "quant": "nf4", "ss_base": "sdxl \u00fc"}


def texts(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_texts_of_a_safetensors_file_come_along(tmp_path):
    state = {"w": torch.ones(2), "v": torch.ones(3)}
    save_file(state, tmp_path / "a.safetensors", metadata=TEXTS)
    xc.export(tmp_path / "a.safetensors", tmp_path / "b.safetensors", only="w")
    assert texts(tmp_path / "b.safetensors") == TEXTS
    xc.export(tmp_path / "a.safetensors", tmp_path / "folder", max_shard_bytes=1)
    for file in (tmp_path / "folder").glob("*.safetensors"):
        assert texts(file) == TEXTS
    xc.export(tmp_path / "folder", tmp_path / "c.safetensors")
    assert texts(tmp_path / "c.safetensors") == TEXTS
    assert xc.inspect(tmp_path / "a.safetensors").user_metadata == {key: TEXTS[key] for key in ("quant", "ss_base")}
    report = xc.export(tmp_path / "a.safetensors", tmp_path / "m.pt", format="torch")
    assert report.objects == ("__metadata__",) and "__metadata__" in str(report)  # the format has no place for them


def test_files_without_texts_and_with_odd_ones_are_exported(tmp_path):
    xc.export({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    assert xc.inspect(tmp_path / "a.safetensors").user_metadata is None
    for number, odd in enumerate((None, 5, [], {"a": 1, "b": "text", "c": "\ud800"})):
        head = json.dumps({"__metadata__": odd}).encode()
        (tmp_path / f"{number}.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
        assert not xc.load({}, tmp_path / f"{number}.safetensors").missing
    assert xc.inspect(tmp_path / "3.safetensors").user_metadata == {"b": "text"}


def test_files_with_different_texts_are_named(tmp_path, caplog):
    (tmp_path / "model").mkdir()
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, tmp_path / "model" / f"{name}.safetensors", metadata={"from": name})
    xc.export(tmp_path / "model", tmp_path / "m.safetensors")
    assert texts(tmp_path / "m.safetensors") == {"format": "pt", "from": "a"}
    assert "b.safetensors has other texts" in caplog.text and "'from'" in caplog.text


def test_header_above_the_limit_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    assert layout.HEADER_LIMIT == layout.INDEX_LIMIT == 100_000_000
    for limit in ("HEADER_LIMIT", "INDEX_LIMIT"):
        monkeypatch.setattr(layout, limit, 1_000_000)
    state = {f"{number:02}" + "x" * 40_000: torch.ones(1) for number in range(26)}
    with pytest.raises(xc.CheckpointError, match=r"header of 1,041,.*safetensors allows 1,000,000.*Nothing was writ"):
        xc.export(state, tmp_path / "m.safetensors")
    with pytest.raises(xc.CheckpointError, match=r"index\.json would have 1,041,.* bytes"):
        xc.export(state, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_large_headers_are_split_over_files(tmp_path, monkeypatch):
    state = {f"{number:03}" + "\u00fc" * 50: torch.full((2,), float(number)) for number in range(100)}
    xc.save({"model": state}, tmp_path / "checkpoint")
    monkeypatch.setattr(layout, "HEADER_LIMIT", 5000)
    for number, source in enumerate((state, tmp_path / "checkpoint")):
        folder = tmp_path / str(number)
        report = xc.export(source, folder)
        assert 5 < len(report.files) < 20
        for name in report.files:
            assert int.from_bytes((folder / name).read_bytes()[:8], "little") <= 5000 and load_file(folder / name)
        assert_same(written(folder), state)
        found = {"model": {}}
        xc.load(found, folder)
        assert_same(found["model"], state)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch lacks the dtype")
def test_tensors_of_four_bits_are_named_with_the_right_reason(tmp_path):
    four = torch.zeros(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(xc.CheckpointError, match=r"an export to safetensors has no dtype for w \(torch.float4"):
        xc.export({"w": four}, tmp_path / "model")
    head = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "f4.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"x")
    with pytest.raises(xc.CheckpointError, match=r"dtypes that this package does not read: 'w' \(F4\)"):
        xc.load({"w": torch.zeros(2)}, tmp_path / "f4.safetensors")

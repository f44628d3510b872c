"""xc show: values, slices, statistics and layouts, read by ranges and in bounded memory."""

import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from support import kinds
from support.command_line import call

pytestmark = pytest.mark.filterwarnings("ignore")
every_kind = pytest.mark.parametrize("kind", kinds.CHECKPOINTS)
MIB = 1 << 20


@every_kind
def test_show_gives_values_and_statistics(made, kind):
    found = call("show", made / kind, kinds.keys_of(kind)[0], "--json").json
    expected = kinds.host_state()["model"]["layers"]["0"]["weight"]
    assert found["values"] == expected.tolist()
    statistics = found["statistics"]
    assert (statistics["min"], statistics["max"], statistics["zeros"]) == (0, 127, 1)
    assert math.isclose(statistics["mean"], expected.mean()) and math.isclose(
        statistics["std"], expected.std(correction=0), rel_tol=1e-6
    )


@every_kind
def test_show_gives_a_slice(made, kind):
    found = call("show", made / kind, f"{kinds.keys_of(kind)[2]}[3:5, -1]", "--json").json
    assert found["values"] == kinds.host_state()["model"]["layers"]["1"]["weight"][3:5, -1].tolist()
    assert found["statistics"]["count"] == 2


def test_show_gives_scalars_and_objects(made):
    assert call("show", made / "ours", "model.scale", "--json").json["values"] == 1.0
    assert call("show", made / "ours", "epoch").lines[1].strip() == "3"
    assert call("show", made / "ours", "config.name").lines[1].strip() == "'small'"


def test_show_draws_the_layout(made, tmp_path):
    found = call("show", made / "ours", "model.layers.0.weight", "--layout").out
    assert "0:4" in found and "4:8" in found and "8 chunks" in found
    devices = call("show", made / "ours", "model.layers.0.weight", "--json").json["layout"]["devices"]
    assert devices["3"] == {"offsets": [4, 4], "sizes": [4, 4]}
    picture = tmp_path / "layout.png"
    call("show", made / "ours", "model.layers.0.weight", "--layout", "-o", picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5_000
    assert call("show", made / "ours", "model.layers.0.weight", "--layout", "-o", tmp_path / "x.nothing").status == 2
    assert "rank 0" in call("show", made / "stock", "steps", "--layout").out


def test_show_refuses_a_key_that_is_not_there(made):
    answer = call("show", made / "ours", "model.layers.9.weight")
    assert answer.status == 2 and "xc ls" in answer.err


ODD = {
    "nan": torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0]),
    "allnan": torch.full((3,), math.nan),
    "empty": torch.empty(0, 4),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([-(2**62), 2**62]),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "uint16": torch.tensor([0, 65535], dtype=torch.uint16),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "float8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "complex64": torch.tensor([3 + 4j, 0j]),
    "float64": torch.tensor([1e308, -1e308], dtype=torch.float64),
    "float16": torch.tensor([1.0, 65504.0], dtype=torch.float16),
    "float8_e5m2": torch.tensor([math.inf, 2.0]).to(torch.float8_e5m2),
    "float8_e8m0": torch.tensor([2.0, 0.5]).to(torch.float8_e8m0fnu),
    "complex_nan": torch.tensor([complex(math.nan, 1), 3 + 4j], dtype=torch.complex128),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "uint64": torch.tensor([0, 2**63], dtype=torch.uint64),
    "scalar": torch.tensor(2.5),
    "scalar_bool": torch.tensor(False),
    "column": torch.ones(3, 0, 2),
}


@pytest.mark.parametrize("name", ODD)
def test_show_every_dtype(tmp_path, name):
    kinds.save_ours(tmp_path / "c", ODD)
    answer = call("show", tmp_path / "c", name)
    assert answer.status == 0, answer.err
    found = call("show", tmp_path / "c", name, "--json").json["statistics"]
    finite = ODD[name].to(torch.complex128).abs() if ODD[name].is_complex() else ODD[name].double()
    finite = finite[finite.isfinite()]
    assert found["count"] == ODD[name].numel()
    assert found["max"] == (finite.max().item() if finite.numel() else None)
    if name == "nan":
        assert (found["nans"], found["infs"], found["zeros"]) == (1, 2, 2)


def test_show_reads_only_the_blocks_of_a_slice(tmp_path):
    kinds.save_ours(tmp_path / "c", {"w": torch.randn(32, MIB)})  # 128 MiB, 4 MiB a row
    found = call("show", tmp_path / "c", "w[7, :5]", "--json").json
    assert 0 < found["bytes_read"] <= 8 * MIB


def test_statistics_of_pieces_are_those_of_the_whole(tmp_path):
    whole = torch.randn(40, 300_000) * 3 + 100  # 48 MiB, which is read in two pieces
    kinds.save_ours(tmp_path / "c", {"w": whole})
    found = call("show", tmp_path / "c", "w", "--json").json["statistics"]
    assert math.isclose(found["mean"], whole.double().mean(), rel_tol=1e-9)
    assert math.isclose(found["std"], whole.double().std(correction=0), rel_tol=1e-9)
    assert (found["min"], found["max"]) == (whole.min().item(), whole.max().item())


@pytest.mark.slow
@every_kind
def test_show_draws_the_layout_of_every_kind(made, tmp_path, kind):
    answer = call("show", made / kind, kinds.keys_of(kind)[0], "-o", tmp_path / "layout.svg")
    assert answer.status == 0 and "chunk" in answer.out
    assert "<svg" in (tmp_path / "layout.svg").read_text()


SLICES = ("::3", "1::7, 2", ":, ::5", "-3:, ::2", "4:4", "::1000", "..., -1", "-1, -1")


@pytest.mark.parametrize("layout", ["whole", "rows", "columns"])
def test_slices_are_the_same_in_small_pieces(tmp_path, monkeypatch, layout):
    """A slice that is read piece by piece, with and without what a step leaves out, is what Python gives."""
    whole = torch.randn(40, 36)
    kinds.save_ours(tmp_path / "a", {"w": whole})
    cut = {"whole": "-,-", "rows": "a,-", "columns": "-,a"}[layout]
    assert call("convert", tmp_path / "a", tmp_path / "c", "--mesh", "a=4", "--spec", f"w={cut}").status == 0
    for pieces, sparse in ((64, 1 << 20), (64, 1), (1 << 20, 1)):
        monkeypatch.setattr("torch_xla_ckpt.inspecting.reading.PIECE_BYTES", pieces)
        monkeypatch.setattr("torch_xla_ckpt.inspecting.reading._LARGE", 1)
        monkeypatch.setattr("torch_xla_ckpt.inspecting.selecting.PIECE_BYTES", pieces)
        monkeypatch.setattr("torch_xla_ckpt.inspecting.selecting._SPARSE", sparse)
        for text in SLICES:
            expected = eval(f"whole[{text}]")
            found = call("show", tmp_path / "c", f"w[{text}]", "--json").json
            assert found["values"] == expected.tolist(), text
            statistics = found["statistics"]
            assert statistics["count"] == expected.numel()
            if expected.numel():
                assert statistics["max"] == expected.max().item()
                assert math.isclose(statistics["std"], expected.double().std(correction=0), abs_tol=1e-9)
        found = call("show", tmp_path / "c", "w", "--json").json["statistics"]
        assert (found["count"], found["min"]) == (whole.numel(), whole.min().item())


def test_a_slice_of_a_large_chunk_of_stock_dcp_reads_a_part_of_it(tmp_path):
    whole = torch.randn(12, MIB)  # 48 MiB
    dcp.save({"w": whole}, checkpoint_id=tmp_path / "c", no_dist=True)
    found = call("show", tmp_path / "c", "w[7, 5:9]", "--json").json
    assert found["values"] == whole[7, 5:9].tolist() and found["bytes_read"] < MIB
    found = call("show", tmp_path / "c", "w", "--json").json["statistics"]
    assert (found["count"], found["max"]) == (whole.numel(), whole.max().item())


def test_a_hole_in_the_chunks_is_an_error_and_not_left_out(tmp_path):
    planner = DefaultSavePlanner()
    dcp.save({"w": torch.ones(8, 300_000)}, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    saved = metadata.state_dict_metadata["w"]
    saved.size = torch.Size((9, 300_000))
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    for key in ("w", "w[7:]"):
        answer = call("show", tmp_path / "c", key)
        assert answer.status == 2 and "[8:9, 0:" in answer.err and "missing" in answer.err, answer
    assert call("show", tmp_path / "c", "w[:8]").status == 0
    assert call("verify", tmp_path / "c").status == 1


@pytest.mark.parametrize("size", [2**40, 2**58])
def test_a_shape_that_claims_more_than_there_is_takes_no_memory(tmp_path, size):
    dcp.save({"w": torch.ones(8)}, checkpoint_id=tmp_path / "c", no_dist=True)
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    saved = metadata.state_dict_metadata["w"]
    saved.size = torch.Size((size,))
    saved.chunks[0].sizes = torch.Size((size,))
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    for command in (("show", "w"), ("show", "w[::999999]"), ("show", "w[-1]"), ("report",)):
        answer = call(
            command[0], tmp_path / "c", *command[1:], *(["-o", tmp_path / "r"] if command == ("report",) else [])
        )
        assert answer.status == 2 and len(answer.err.splitlines()) == 1, answer.err
    assert call("ls", tmp_path / "c").status == 0
    assert call("verify", tmp_path / "c").status in (0, 1)


def test_numbers_that_json_lacks_are_texts(tmp_path):
    kinds.save_ours(tmp_path / "c", {"w": torch.tensor([math.nan, math.inf, -math.inf]), "c": torch.tensor([1 + 2j])})
    answer = call("show", tmp_path / "c", "w", "--json")
    assert answer.json["values"] == ["NaN", "Infinity", "-Infinity"] and answer.json["statistics"]["mean"] is None
    assert call("show", tmp_path / "c", "c", "--json").json["values"] == [[1.0, 2.0]]

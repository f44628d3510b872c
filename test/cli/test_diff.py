"""xc diff: which keys differ, and by how much, whatever the layouts."""

import math
import shutil

import numpy as np
import pytest
import torch

from support import kinds
from support.command_line import call

pytestmark = pytest.mark.filterwarnings("ignore")
every_kind = pytest.mark.parametrize("kind", kinds.CHECKPOINTS)


def copied(source, path):
    """Copy a checkpoint, which is a folder or a file."""
    (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
    return path


@every_kind
def test_a_checkpoint_equals_itself_and_its_copy(made, tmp_path, kind):
    answer = call("diff", made / kind, copied(made / kind, tmp_path / "c"), "--json")
    assert answer.status == 0 and answer.json["same"] is True
    if kind == "ours":
        assert answer.json["bytes_read"] == 0


@pytest.mark.parametrize("kind", ["stock", "torch_xla"])
def test_other_layouts_of_the_same_values_are_equal(made, kind):
    answer = call("diff", made / "ours", made / kind, "model.*", "steps", "epoch", "--json")
    assert answer.status == 0 and len(answer.json["keys"]) == 9, answer.out


def test_diff_says_by_how_much_values_differ(tmp_path):
    state = kinds.sharded_state()
    kinds.save_ours(tmp_path / "a", state)
    other = kinds.host_state()
    other["model"]["layers"]["1"]["weight"][3, 4] += 5
    other["config"]["name"] = "large"
    del other["epoch"]
    other["steps"] = other["steps"].int()
    other["model"]["scale"] = torch.ones(2)
    other["extra"] = torch.zeros(1)
    kinds.save_ours(tmp_path / "b", other)
    answer = call("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert answer.status == 1 and answer.json["same"] is False
    found = {one["key"]: one for one in answer.json["keys"]}
    changed = found["model.layers.1.weight"]
    assert (changed["status"], changed["share"], changed["max_abs"]) == ("differs", 1 / 128, 5.0)
    assert found["model.layers.0.weight"]["status"] == "equal"
    assert found["config.name"]["status"] == "differs"
    assert found["epoch"]["status"] == "only in a" and found["extra"]["status"] == "only in b"
    assert found["steps"]["status"] == "other dtype" and found["model.scale"]["status"] == "other shape"
    text = call("diff", tmp_path / "a", tmp_path / "b").out
    assert "0.78%" in text and "'small' -> 'large'" in text


def test_diff_reads_only_the_chunks_that_differ(tmp_path):
    state = {"w": torch.zeros(64, 1024), "v": torch.zeros(64, 1024)}
    kinds.save_ours(tmp_path / "a", state)
    state["v"][0, 0] = math.nan
    kinds.save_ours(tmp_path / "b", state)
    found = call("diff", tmp_path / "a", tmp_path / "b", "--json").json
    assert found["bytes_compared"] == 64 * 1024 * 4
    assert [one["max_abs"] for one in found["keys"]] == [None, "NaN"]


def test_diff_of_globs(made):
    assert call("diff", made / "run/10", made / "run/20", "steps").status == 0
    assert call("diff", made / "run/10", made / "run/20").status == 1


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.uint32, torch.int64, torch.uint64, torch.float8_e4m3fn]
DTYPES += [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_diff_counts_the_elements_that_differ_of_every_dtype(tmp_path, dtype):
    values = torch.zeros(40)
    kinds.save_ours(tmp_path / "a", {"w": values.to(dtype)})
    values[7] = 1
    kinds.save_ours(tmp_path / "b", {"w": values.to(dtype)})
    (found,) = call("diff", tmp_path / "a", tmp_path / "b", "--json").json["keys"]
    assert (found["share"], found["max_abs"]) == (1 / 40, 1.0)


@pytest.mark.parametrize("small", [1, 1 << 40])
def test_diff_of_chunks_that_differ_is_the_same_in_slabs_and_one_by_one(tmp_path, monkeypatch, small):
    monkeypatch.setattr("torch_xla_ckpt.inspecting.diffing._SMALL", small)
    monkeypatch.setattr("torch_xla_ckpt.inspecting.diffing._SLAB_BYTES", 100)
    values = torch.zeros(16, 12)
    for name, edit in (("a", 0.0), ("b", 3.0)):
        values[5, 7] = values[11, 0] = edit
        kinds.save_ours(tmp_path / "whole", {"w": values})
        cut = ("--mesh", "a=4,b=2", "--spec", "w=a,b", "--overwrite")
        assert call("convert", tmp_path / "whole", tmp_path / name, *cut).status == 0
    (found,) = call("diff", tmp_path / "a", tmp_path / "b", "--json").json["keys"]
    assert (found["share"], found["max_abs"]) == (2 / 192, 3.0)


def test_diff_gives_each_key_a_line_on_request(made):
    lines = call("diff", made / "run/10", made / "run/20", "--all").lines
    assert sum("model.layers." in line for line in lines) == 6
    assert any(line.startswith("equal") and line.endswith("steps") for line in lines)


def test_objects_are_compared_by_value(tmp_path):
    shared = "x" * 50
    kinds.save_ours(tmp_path / "a", {"o": [shared, shared], "n": math.nan, "t": (1, 2)})
    kinds.save_ours(tmp_path / "b", {"o": [shared, "".join(list(shared))], "n": math.nan, "t": [1, 2]})
    found = {one["key"]: one["status"] for one in call("diff", tmp_path / "a", tmp_path / "b", "--json").json["keys"]}
    assert (found["o"], found["n"]) == ("equal", "equal") and "equal" not in {found.get("t"), found.get("t.0", "")}


@pytest.mark.parametrize(
    ("dtype", "a", "b", "largest"),
    [
        (torch.int64, 2**60, 2**60 + 1, 1),
        (torch.int64, -(2**63), 2**63 - 1, 2**64 - 1),
        (torch.uint64, 2**64 - 1, 2**64 - 4, 3),
        (torch.uint64, 0, 2**64 - 1, 2**64 - 1),
        (torch.int32, -(2**31), 2**31 - 1, 2**32 - 1),
        (torch.uint32, 2**32 - 1, 0, 2**32 - 1),
        (torch.uint16, 65535, 1, 65534),
        (torch.int8, -128, 127, 255),
        (torch.uint8, 3, 250, 247),
        (torch.bool, True, False, 1),
    ],
)
def test_the_largest_difference_of_integers_is_exact(tmp_path, dtype, a, b, largest):
    for name, value in (("a", a), ("b", b)):
        kinds.save_ours(tmp_path / name, {"w": torch.tensor([value, 1, value], dtype=dtype)})
    for first, second in (("a", "b"), ("b", "a")):
        answer = call("diff", tmp_path / first, tmp_path / second, "--json")
        (one,) = answer.json["keys"]
        assert answer.status == 1 and one["max_abs"] == largest and type(one["max_abs"]) is int
        assert f" {largest} " in call("diff", tmp_path / first, tmp_path / second).out


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (-0.0, 0.0),
        ([1, {"x": (-0.0,)}], [1, {"x": (0.0,)}]),
        (complex(0.0, -0.0), complex(0.0, 0.0)),
        ({0.0: 1}, {-0.0: 1}),
        (np.float32(-0.0), np.float32(0.0)),
        (np.array([-0.0]), np.array([0.0])),
        (1, True),
        (1, 1.0),
    ],
)
def test_objects_that_python_calls_equal_differ_bit_by_bit(tmp_path, a, b):
    kinds.save_ours(tmp_path / "a", {"x": a})
    kinds.save_ours(tmp_path / "b", {"x": b})
    assert call("diff", tmp_path / "a", tmp_path / "b").status == 1
    assert call("diff", tmp_path / "a", tmp_path / "a").status == 0

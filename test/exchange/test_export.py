"""xc.export: what is written, and under which names."""

import json
import os
import pickle
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file

import torch_xla_ckpt as xc
from support import exported
from support.exported import HOST, assert_nothing_left, assert_same, live, written
from support.meshes import random_bits, same_bits
from torch_xla_ckpt.formats import NAMES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "run" / "100"
    xc.save(exported.state(), path)
    return path


@pytest.fixture(params=["checkpoint", "live"])
def source(request):
    return {"model": live(), "step": 100} if request.param == "live" else request.getfixturevalue("checkpoint")


def test_every_tensor_is_written_bit_by_bit(tmp_path, source):
    report = xc.export(source, tmp_path / "deep" / "model")
    assert os.listdir(tmp_path / "deep" / "model") == ["model.safetensors"]
    assert_same(written(tmp_path / "deep" / "model"))
    with safe_open(tmp_path / "deep" / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert set(report.tensors) == set(HOST) and report.tensors["mask"] == "model.mask"
    assert report.files == {"model.safetensors": (tmp_path / "deep/model/model.safetensors").stat().st_size}
    assert report.bytes_written == sum(value.nbytes for value in HOST.values())
    assert_nothing_left(tmp_path / "deep")


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (2, 4)])
def test_any_mesh_is_exported(tmp_path, shape):
    state = {"model": live(shape)}
    xc.export(state, tmp_path / "live")
    xc.save(state, tmp_path / "checkpoint")
    xc.export(tmp_path / "checkpoint", tmp_path / "saved")
    assert_same(written(tmp_path / "live"))
    assert (tmp_path / "live/model.safetensors").read_bytes() == (tmp_path / "saved/model.safetensors").read_bytes()


def test_large_models_are_files_with_an_index(tmp_path, source):
    report = xc.export(source, tmp_path / "model", max_shard_bytes=300_000)
    names = sorted(report.files)
    assert len(names) == 3 and names[0] == "model-00001-of-00003.safetensors"
    assert sorted(os.listdir(tmp_path / "model")) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in HOST.values())
    for key, name in index["weight_map"].items():
        with safe_open(tmp_path / "model" / name, "pt") as file:
            assert same_bits(file.get_tensor(key), HOST[key])
    state = {"model": {}}
    xc.load(state, tmp_path / "model")
    assert_same(state["model"])


def test_every_dtype_of_the_format_is_written(tmp_path):
    state = {str(dtype): random_bits((3, 5), dtype, 7) for dtype in NAMES}
    state |= {f"{dtype} 0-d": random_bits((), dtype, 8) for dtype in NAMES}
    state |= {f"{dtype} empty": torch.empty((2, 0), dtype=dtype) for dtype in NAMES}
    xc.save({"model": state}, tmp_path / "checkpoint")
    for number, source in enumerate(({"model": state}, tmp_path / "checkpoint")):
        xc.export(source, tmp_path / str(number))
        loaded = {key: torch.zeros_like(value) for key, value in state.items()}
        xc.load(loaded, tmp_path / str(number))
        assert_same(loaded, state)
        known = {key: value for key, value in state.items() if "e8m0" not in key}  # the library's reader lacks it
        with safe_open(tmp_path / str(number) / "model.safetensors", "pt") as file:
            assert_same({key: file.get_tensor(key) for key in known}, known)


@pytest.mark.parametrize("format, name", [("safetensors", "n" * 250), ("torch", "n" * 250 + ".pt")])
def test_the_name_of_the_target_may_be_as_long_as_the_system_allows(tmp_path, format, name):
    for value in (1, 2):
        xc.export({"w": torch.full((3,), value)}, tmp_path / name, format=format)
    loaded = {"w": torch.zeros(3, dtype=torch.int64)}
    xc.load(loaded, tmp_path / name)
    assert loaded["w"].tolist() == [2, 2, 2] and os.listdir(tmp_path) == [name]


def test_dtypes_that_the_format_lacks_are_one_error_before_anything_is_written(tmp_path):
    state = {"a": torch.zeros(2, dtype=torch.complex128), "b": torch.ones(2), "c": torch.ones(1).to(torch.complex128)}
    xc.save({"model": state}, tmp_path / "checkpoint")
    for source in (state, tmp_path / "checkpoint"):
        with pytest.raises(xc.CheckpointError, match=r"(?s)no dtype for .*a \(.*c \(torch.complex128"):
            xc.export(source, tmp_path / "model")
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(xc.CheckpointError, match=r"(?s)'q1'.*'q2'.*Nothing was written"):
        xc.export({"q1": quantized, "q2": quantized, "b": torch.ones(2)}, tmp_path / "model")
    with pytest.raises(xc.CheckpointError, match="meta device has no values"):
        xc.export({"m": torch.ones(2, device="meta")}, tmp_path / "model")
    dcp.save({"model": {"q": quantized, "b": torch.ones(2)}}, checkpoint_id=tmp_path / "stock")
    for format in ("torch", "safetensors"):
        with pytest.raises(xc.CheckpointError, match=r"model.q \(torch.qint8\): quantized, and saved without scales"):
            xc.export(tmp_path / "stock", tmp_path / "model", format=format)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "stock"]
    report = xc.export({"model": state}, tmp_path / "model.pt", format="torch")
    assert torch.load(tmp_path / "model.pt", weights_only=True)["a"].dtype == torch.complex128
    assert list(report.tensors) == ["a", "b", "c"]


def test_objects_are_left_out_and_named(tmp_path):
    state = {"model": {"w": torch.ones(3), "_extra_state": b"bytes", "n": 5}}
    xc.save(state, tmp_path / "checkpoint")
    for number, source in enumerate((state, tmp_path / "checkpoint")):
        report = xc.export(source, tmp_path / str(number))
        assert set(report.objects) == {"model._extra_state", "model.n"} and "left out" in str(report)
        assert list(written(tmp_path / str(number))) == ["w"]


def test_cast_is_the_cast_of_torch_and_integers_stay(tmp_path, source):
    report = xc.export(source, tmp_path / "model", dtype=torch.bfloat16)
    expected = {key: value.bfloat16() if value.is_floating_point() else value for key, value in HOST.items()}
    assert_same(written(tmp_path / "model"), expected)
    assert report.cast["cube"] == (torch.float32, torch.bfloat16) and "columns" not in report.cast


def test_eight_bit_floats_are_not_cast(tmp_path):
    state = {"w": random_bits((4, 4), torch.float8_e4m3fn), "scale": torch.ones(4)}
    xc.export(state, tmp_path / "model", dtype=torch.bfloat16)
    assert_same(written(tmp_path / "model"), {"w": state["w"], "scale": state["scale"].bfloat16()})


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    names = ["module._orig_module.a._checkpoint_wrapped_module.w", "module._orig_mod.b"]
    report = xc.export({"model": {name: torch.ones(2) for name in names}}, tmp_path / "model")
    assert set(written(tmp_path / "model")) == {"a.w", "b"} and report.renamed["b"] == "model.module._orig_mod.b"
    xc.export({"module.a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "other")  # a name of the model's own
    assert set(written(tmp_path / "other")) == {"module.a", "b"}


def test_rename_only_and_exclude_choose_and_name(tmp_path, checkpoint):
    xc.export(checkpoint, tmp_path / "1", rename={"cube": "dice"}, exclude=["*.layers.*", "*.empty"])
    assert set(written(tmp_path / "1")) == {"dice", "columns", "mask", "count"}
    xc.export(checkpoint, tmp_path / "2", rename=lambda name: f"x.{name}" if "layers" in name else None)
    assert "x.layers.0.bias" in written(tmp_path / "2") and "cube" in written(tmp_path / "2")
    for options, match in (
        ({"only": "nothing"}, "no key of the source matches 'nothing'"),
        ({"rename": {"lost": "x"}}, "names tensors that the model lacks: lost"),
        ({"rename": {"cube": "mask"}}, "both get the name 'mask'"),
        ({"key": "teacher"}, "nothing under key='teacher'.*'model', 'step', 'optim'"),
        ({"key": "step"}, "nothing under key='step'"),
    ):
        with pytest.raises(xc.CheckpointError, match=match):
            xc.export(checkpoint, tmp_path / "3", **options)
    assert not (tmp_path / "3").exists()


def test_model_is_found_if_there_is_one(tmp_path):
    def names(number, state, **options):
        xc.save(state, tmp_path / f"c{number}")
        xc.export(tmp_path / f"c{number}", tmp_path / f"m{number}", **options)
        xc.export(state, tmp_path / f"l{number}", **options)
        assert set(written(tmp_path / f"l{number}")) == set(written(tmp_path / f"m{number}"))
        return set(written(tmp_path / f"m{number}"))

    one = {"w": torch.ones(2)}
    optim = {"state": {0: {"exp": torch.ones(2)}}, "param_groups": [{"lr": 1.0}]}
    assert names(1, {"net": one, "optim": optim, "step": 1}) == {"w"}
    assert names(2, one) == {"w"}
    assert names(3, {"model": one, "ema": one}) == {"w"}
    assert names(4, {"a": one, "b": {"v": torch.ones(1)}}, key="b") == {"v"}
    assert names(5, {"a": one, "b": one}, key="") == {"a.w", "b.w"}
    with pytest.raises(xc.CheckpointError, match=r"cannot tell which key holds the model.*'a', 'b'"):
        names(6, {"a": one, "b": one})
    with pytest.raises(xc.CheckpointError, match="no tensor to export"):
        xc.export({"step": 1}, tmp_path / "m7")
    # DCP's tutorial saves {"app": AppState()}, and Lightning a list of optimizers.
    assert names(8, {"app": {"model": one, "optim": optim}, "epoch": 1}) == {"w"}
    assert names(9, {"state_dict": one, "optimizer_states": [optim], "callbacks": {"best": {"x": torch.ones(1)}}}) == {
        "w"
    }
    flat = {"state.w.exp": torch.ones(2), "param_groups.w.lr": 0.1}
    assert names(10, {"app": {"net": one, "optim": flat}}) == {"w"}


# Sources of every kind.


def test_checkpoint_of_stock_dcp_is_exported(tmp_path):
    dcp.save({"model": HOST}, checkpoint_id=tmp_path / "stock")
    xc.export(tmp_path / "stock", tmp_path / "model")
    assert_same(written(tmp_path / "model"))


def test_conjugated_tensors_of_stock_dcp_are_exported_as_they_are(tmp_path):
    state = {"conj": random_bits((3, 5), torch.complex64).conj(), "view": random_bits((6, 4), torch.float32).t()}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "stock", no_dist=True)
    xc.export(tmp_path / "stock", tmp_path / "model.pt", format="torch")
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), {k: v.resolve_conj() for k, v in state.items()})


def test_step_of_a_run_is_exported_and_the_run_itself_names_its_steps(tmp_path):
    with xc.CheckpointManager(tmp_path / "run") as manager:
        manager.save(10, {"model": HOST}, force=True)
    xc.export(tmp_path / "run" / "10", tmp_path / "model")
    assert_same(written(tmp_path / "model"))
    with pytest.raises(xc.CheckpointError, match="it is the folder of a run and holds the steps 10"):
        xc.export(tmp_path / "run", tmp_path / "other")


def test_formats_of_others_are_exported_into_one_another(tmp_path, checkpoint):
    xc.export(checkpoint, tmp_path / "a.safetensors")
    xc.export(tmp_path / "a.safetensors", tmp_path / "b.pt", format="torch")
    xc.export(tmp_path / "b.pt", tmp_path / "c", max_shard_bytes=1000)
    xc.export(tmp_path / "c", tmp_path / "d")
    assert_same(written(tmp_path / "a.safetensors"))
    assert_same(torch.load(tmp_path / "b.pt", weights_only=True))
    assert_same(torch.load(tmp_path / "b.pt", weights_only=True, mmap=True))
    assert_same(written(tmp_path / "c"))
    assert_same(written(tmp_path / "d"))


def test_small_memory_budget_writes_the_same_bytes(tmp_path, source):
    xc.export(source, tmp_path / "a")
    xc.export(source, tmp_path / "b", memory_budget=1)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_cast_of_a_large_tensor_is_the_cast_of_torch(tmp_path):
    """It is cast in pieces."""
    state = {"w": torch.randn(3, (1 << 20) + 5), "t": torch.randn(1 << 10, 1 << 11).t()}
    xc.save({"model": state}, tmp_path / "checkpoint")
    for number, source in enumerate((state, tmp_path / "checkpoint")):
        report = xc.export(source, tmp_path / str(number), dtype=torch.float16)
        assert_same(written(tmp_path / str(number)), {key: value.half() for key, value in state.items()})
        assert report.bytes_written == sum(2 * value.numel() for value in state.values())


def test_torch_file_is_whole_for_verify_and_for_zip_programs(tmp_path, source):
    xc.export(source, tmp_path / "model.pt", format="torch")
    assert xc.verify(tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert len(archive.namelist()) > len(HOST)


@pytest.mark.parametrize("wrapper", ["_orig_module", "_orig_mod", "module"])
def test_configuration_of_a_wrapped_model_names_the_model(tmp_path, wrapper):
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8))

    class Wrapper(torch.nn.Module):
        config = model.config

    wrapped = Wrapper()
    wrapped.add_module(wrapper, model)
    xc.export({"model": wrapped.state_dict()}, tmp_path / "model", config_from=wrapped)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["GPT2Model"]
    opened = transformers.AutoModel.from_pretrained(tmp_path / "model")
    assert_same(opened.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["with space", "*", "a::b", "ünï", "~x", "dot.folder"])
def test_path_is_taken_literally(tmp_path, checkpoint, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    xc.export(checkpoint, f"./{name}")
    assert_same(written(tmp_path / name))


# What is at the path before and after.


def test_model_at_the_path_is_never_replaced(tmp_path, source):
    save_file({"old": torch.ones(1)}, tmp_path / "model.safetensors")
    for options in ({}, {"max_shard_bytes": 1000}):
        with pytest.raises(xc.CheckpointError, match=r"already has model\.safetensors\. Nothing was written"):
            xc.export(source, tmp_path, **options)
    assert list(written(tmp_path)) == ["old"] and os.listdir(tmp_path) == ["model.safetensors"]


def test_checkpoint_at_the_path_is_never_replaced(tmp_path, checkpoint):
    with pytest.raises(xc.CheckpointError, match="would replace its own source"):
        xc.export(checkpoint, checkpoint)
    with pytest.raises(xc.CheckpointError, match=r"already has \.metadata"):
        xc.export({"w": torch.ones(1)}, checkpoint)


def test_other_files_at_the_path_stay(tmp_path, source):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    xc.export(source, folder, max_shard_bytes=300_000)
    assert_same(written(folder))
    assert (folder / "README.md").read_text() == "mine" and len(os.listdir(folder)) == 5


def test_single_file_is_replaced_in_one_step(tmp_path, source):
    for path, options in ((tmp_path / "m.pt", {"format": "torch"}), (tmp_path / "m.safetensors", {})):
        path.write_bytes(b"old")
        xc.export(source, path, **options)
        state = {"model": {}}
        xc.load(state, path)
        assert_same(state["model"])
    assert sorted(os.listdir(tmp_path)) == ["m.pt", "m.safetensors"]


def test_folder_and_file_are_not_confused(tmp_path, checkpoint):
    (tmp_path / "m.pt").mkdir()
    (tmp_path / "m.pt" / "mine").touch()
    (tmp_path / "file").touch()
    with pytest.raises(xc.CheckpointError, match="is a folder, and the export writes one file"):
        xc.export(checkpoint, tmp_path / "m.pt", format="torch")
    with pytest.raises(xc.CheckpointError, match="is a file, and the export writes a folder"):
        xc.export(checkpoint, tmp_path / "file")


def test_damaged_checkpoint_is_not_exported(tmp_path):
    xc.save({"model": HOST}, tmp_path / "checkpoint")
    (file,) = [name for name in (tmp_path / "checkpoint").glob("*_0-*.distcp")][:1]
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(xc.CorruptCheckpointError):
        xc.export(tmp_path / "checkpoint", tmp_path / "model")
    assert os.listdir(tmp_path) == ["checkpoint"]
    xc.export(tmp_path / "checkpoint", tmp_path / "model", verify=False)


def test_incomplete_checkpoint_is_not_exported(tmp_path):
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.storage_data.clear()
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(xc.IncompleteCheckpointError, match=r"model\.w"):
        xc.export(tmp_path / "checkpoint", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "options, match",
    [
        ({"format": "onnx"}, "choose one of 'safetensors', 'torch'"),
        ({"max_shard_bytes": 0}, "must be positive"),
        ({"memory_budget": -1}, "must be positive"),
        ({"dtype": torch.int8}, "floating-point dtypes"),
        ({"dtype": torch.float8_e5m2}, "floating-point dtypes"),
        ({"dtype": "bfloat61"}, "torch has no such dtype"),
        ({"dtype": "nn"}, "is no dtype"),
        ({"dtype": 16}, "is no dtype"),
        ({"max_shard_bytes": "5GB"}, "'5GB': pass the number of bytes as an int"),
        ({"memory_budget": 1e9}, "pass the number of bytes as an int"),
        ({"format": "torch", "config_from": "x"}, "one file"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        xc.export({"a": torch.ones(1)}, tmp_path / "model", **options)


def test_source_that_is_neither_path_nor_state_is_refused(tmp_path):
    for source in (None, 5, torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match="the source of an export is the path of a checkpoint or a state dict"):
            xc.export(source, tmp_path / "model")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_dtype_is_given_by_its_name(tmp_path, name):
    xc.export({"w": torch.ones(2)}, tmp_path / "model", dtype=name)
    assert written(tmp_path / "model")["w"].dtype == torch.bfloat16


def test_configuration_beside_a_single_file_is_refused_before_anything_is_written(tmp_path, checkpoint):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config_from= writes files beside the weights.*one\.safetensors writes one"):
        xc.export(checkpoint, tmp_path / "one.safetensors", config_from=tmp_path)
    assert os.listdir(tmp_path) == ["config.json"]


def test_configuration_is_copied_and_its_dtype_follows_the_cast(tmp_path, checkpoint):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float32"}')
    copied = ["tokenizer.json", "generation_config.json", "merges.txt", "vocab.json", "chat_template.jinja"]
    for name in [*copied, "model.safetensors", "training_args.bin", "optimizer.pt", "trainer_state.json"]:
        (source / name).write_text("{}")
    report = xc.export(checkpoint, tmp_path / "model", config_from=source, dtype=torch.bfloat16)
    assert set(os.listdir(tmp_path / "model")) == {"model.safetensors", "config.json", *copied}
    assert set(report.copied) == {"config.json", *copied}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(xc.CheckpointError, match=r"is a file\. .*Pass the folder that holds config\.json"):
        xc.export(checkpoint, tmp_path / "other", config_from=source / "config.json")
    with pytest.raises(xc.CheckpointError, match=r"has no config\.json"):
        xc.export(checkpoint, tmp_path / "other", config_from=tmp_path)
    assert not (tmp_path / "other").exists()

"""xc.export: what is written, under which names, and that nothing looks like a model until all of it is."""

import json
import logging
import os
import pickle
import signal
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import torch_xla_ckpt as xc
from support import killed_export
from support.meshes import mesh, put, random_bits, same_bits
from support.programs import Program
from support.s3 import Server
from torch_xla_ckpt.formats import NAMES

MESH = (4, 2)
HOST = {
    "layers.0.weight": random_bits((300, 200), torch.float32, 1),
    "layers.0.bias": random_bits((300,), torch.bfloat16, 2),
    "layers.1.weight": random_bits((513, 7), torch.float16, 3),
    "columns": random_bits((64, 4096), torch.int32, 4),
    "cube": random_bits((6, 5, 11), torch.float32, 5),
    "mask": random_bits((5, 3), torch.bool, 6),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 5),
}
SPECS = {
    "layers.0.weight": ("b", "a"),
    "layers.0.bias": ("a",),
    "layers.1.weight": ("a", "b"),
    "columns": (None, "a"),
    "cube": (None, "b", "a"),
}


def live(shape=MESH):
    return {key: put(value, mesh(shape), SPECS.get(key)) for key, value in HOST.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "run" / "100"
    xc.save({"model": live(), "step": 100, "optim": {"state": {0: {"m": torch.ones(3)}}, "param_groups": []}}, path)
    return path


@pytest.fixture(params=["checkpoint", "live"])
def source(request):
    return {"model": live(), "step": 100} if request.param == "live" else request.getfixturevalue("checkpoint")


def written(path):
    """All tensors in the safetensors files of a folder, as the safetensors library reads them."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {key: value for file in files for key, value in load_file(file).items()}


def assert_same(found, expected=HOST):
    assert found.keys() == expected.keys()
    different = [key for key, value in expected.items() if not same_bits(found[key], value)]
    assert not different


def nothing_left(folder):
    assert [name for name in os.listdir(folder) if "export" in name] == []


def test_every_tensor_is_written_bit_by_bit(tmp_path, source):
    report = xc.export(source, tmp_path / "deep" / "model")
    assert os.listdir(tmp_path / "deep" / "model") == ["model.safetensors"]
    assert_same(written(tmp_path / "deep" / "model"))
    with safe_open(tmp_path / "deep" / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert set(report.tensors) == set(HOST) and report.tensors["mask"] == "model.mask"
    assert report.files == {"model.safetensors": (tmp_path / "deep/model/model.safetensors").stat().st_size}
    assert report.bytes_written == sum(value.nbytes for value in HOST.values())
    nothing_left(tmp_path / "deep")


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


def test_dtypes_that_the_format_lacks_are_one_error_before_anything_is_written(tmp_path):
    state = {"a": torch.zeros(2, dtype=torch.complex128), "b": torch.ones(2), "c": torch.ones(1).to(torch.complex128)}
    xc.save({"model": state}, tmp_path / "checkpoint")
    for source in (state, tmp_path / "checkpoint"):
        with pytest.raises(xc.CheckpointError, match=r"(?s)no dtype for .*a \(.*c \(torch.complex128"):
            xc.export(source, tmp_path / "model")
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(xc.CheckpointError, match="(?s)'q1'.*'q2'.*Nothing was written"):
        xc.export({"q1": quantized, "q2": quantized, "b": torch.ones(2)}, tmp_path / "model")
    with pytest.raises(xc.CheckpointError, match="meta device has no values"):
        xc.export({"m": torch.ones(2, device="meta")}, tmp_path / "model")
    assert os.listdir(tmp_path) == ["checkpoint"]
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
    with pytest.raises(xc.CheckpointError, match="cannot tell which key holds the model.*'a', 'b'"):
        names(6, {"a": one, "b": one})
    with pytest.raises(xc.CheckpointError, match="no tensor to export"):
        xc.export({"step": 1}, tmp_path / "m7")


# Sources of every kind.


def test_checkpoint_of_stock_dcp_is_exported(tmp_path):
    dcp.save({"model": HOST}, checkpoint_id=tmp_path / "stock")
    xc.export(tmp_path / "stock", tmp_path / "model")
    assert_same(written(tmp_path / "model"))


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


def test_store_behind_fsspec_gets_whole_files(tmp_path, source, request):
    root = f"memory://{id(request)}"
    xc.export(source, f"{root}/model", max_shard_bytes=300_000)
    xc.export(source, f"{root}/file.safetensors", memory_budget=1)
    xc.export(source, f"{root}/file.pt", format="torch")
    for path in ("model", "file.safetensors", "file.pt"):
        state = {"model": {}}
        xc.load(state, f"{root}/{path}")
        assert_same(state["model"])
    with pytest.raises(xc.CheckpointError, match="already has"):
        xc.export(source, f"{root}/model")


def test_object_store_gets_a_model_and_gives_it_back(tmp_path, source):
    with Server() as s3, s3.bucket("models"):
        options = s3.options
        report = xc.export(source, "s3://models/m", max_shard_bytes=300_000, storage_options=options)
        state = {"model": {}}
        loaded = xc.load(state, "s3://models/m", storage_options=options)
        assert_same(state["model"])
        assert len(report.files) == 3 and loaded.bytes_read <= 1.05 * loaded.bytes_needed
        assert xc.verify("s3://models/m", storage_options=options)
        xc.export("s3://models/m", "s3://models/one.safetensors", storage_options=options)
        xc.export("s3://models/m", "s3://models/one.pt", format="torch", storage_options=options)
        for path in ("one.safetensors", "one.pt"):
            state = {"model": {}}
            xc.load(state, f"s3://models/{path}", storage_options=options)
            assert_same(state["model"])


def test_small_memory_budget_writes_the_same_bytes(tmp_path, source):
    xc.export(source, tmp_path / "a")
    xc.export(source, tmp_path / "b", memory_budget=1)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


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
    with pytest.raises(xc.CheckpointError, match=r"already has \.metadata"):
        xc.export(checkpoint, checkpoint)


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


@pytest.mark.parametrize("existing", [False, True], ids=["new folder", "existing folder"])
@pytest.mark.parametrize(
    "operation, nth",
    [("pwrite", 1), ("pwrite", 5), ("fsync", 1), ("fsync", 4), ("rename", 1), ("link", 2), ("link", 4)],
)
def test_killed_export_leaves_nothing_that_looks_like_a_model(tmp_path, checkpoint, existing, operation, nth):
    if (operation == "rename" and existing) or (operation == "link" and not existing):
        pytest.skip("this operation is not used here")
    folder = tmp_path / "model"
    if existing:
        folder.mkdir()
        (folder / "README.md").write_text("mine")
    options = {"max_shard_bytes": 300_000}
    arguments = (str(checkpoint), str(folder), operation, nth, options)
    program = Program(killed_export.run, arguments, tmp_path / "output.txt")
    assert program.wait(100) == -signal.SIGKILL, (tmp_path / "output.txt").read_text()
    assert not (folder / "model.safetensors.index.json").exists() and not (folder / "model.safetensors").exists()
    if nth < 4:  # before the last link, all weights are there, and only their index is missing
        with pytest.raises(xc.CheckpointError):
            xc.load({"model": {}}, folder)
    if operation == "link":  # the next export names the files that the killed one left
        with pytest.raises(xc.CheckpointError, match="already has model-00001"):
            xc.export(checkpoint, folder, **options)
        for file in folder.glob("*.safetensors"):
            file.unlink()
    xc.export(checkpoint, folder, **options)
    assert_same(written(folder))
    assert [name for name in os.listdir(tmp_path) if name.endswith(".part")] == []
    assert [name for name in os.listdir(folder) if name.endswith(".part")] == []


def test_failed_export_removes_what_it_wrote(tmp_path, checkpoint, monkeypatch):
    real, calls = os.pwrite, []

    def full(*args):
        calls.append(args)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    for source in (checkpoint, {"model": live()}):
        calls.clear()
        with pytest.raises((OSError, xc.CheckpointError), match="No space left"):
            xc.export(source, tmp_path / "model")
        assert os.listdir(tmp_path) == []


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


@pytest.mark.parametrize("existing", [False, True], ids=["new folder", "existing folder"])
def test_two_programs_at_once_leave_one_whole_model(tmp_path, checkpoint, existing):
    folder = tmp_path / "model"
    if existing:
        folder.mkdir()
    results = []

    def work():
        try:
            results.append(xc.export(checkpoint, folder, max_shard_bytes=300_000))
        except xc.CheckpointError as error:
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(isinstance(one, xc.ExportReport) for one in results), results
    assert_same(written(folder))
    nothing_left(tmp_path)


def test_read_only_folder_is_an_error_that_leaves_nothing(tmp_path, checkpoint):
    if os.geteuid() == 0:
        (tmp_path / "file").touch()
        with pytest.raises((OSError, xc.CheckpointError)):
            xc.export(checkpoint, tmp_path / "file" / "model")
        return
    tmp_path.chmod(0o500)
    with pytest.raises(OSError):
        xc.export(checkpoint, tmp_path / "model")


@pytest.mark.parametrize(
    "options, match",
    [
        ({"format": "onnx"}, "choose one of 'safetensors', 'torch'"),
        ({"max_shard_bytes": 0}, "must be positive"),
        ({"memory_budget": -1}, "must be positive"),
        ({"dtype": torch.int8}, "floating-point dtypes"),
        ({"dtype": torch.float8_e5m2}, "floating-point dtypes"),
        ({"format": "torch", "config_from": "x"}, "one file"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        xc.export({"a": torch.ones(1)}, tmp_path / "model", **options)


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
    with pytest.raises(xc.CheckpointError, match="has no config.json"):
        xc.export(checkpoint, tmp_path / "other", config_from=tmp_path)
    assert not (tmp_path / "other").exists()


# Tied weights.

EMBED = random_bits((64, 32), torch.float32, 9)
TIED = {"model.embed_tokens.weight": EMBED, "norm.weight": torch.ones(32), "lm_head.weight": EMBED.clone()}


def test_head_with_the_bytes_of_the_embedding_is_written_once(tmp_path):
    rows = {key: put(value, mesh(MESH), ("a", None)[: value.ndim]) for key, value in TIED.items()}
    xc.save({"model": rows}, tmp_path / "checkpoint")
    shared = put(EMBED, mesh(MESH), ("a", "b"))
    sources = {
        "saved": tmp_path / "checkpoint",
        "equal": rows,
        "shared": {**TIED, "model.embed_tokens.weight": shared, "lm_head.weight": shared.detach()},
        "host": TIED,
    }
    for name, source in sources.items():
        report = xc.export(source, tmp_path / name)
        assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}, name
        assert "is model.embed_tokens.weight" in str(report)
        assert_same(written(tmp_path / name), {key: value for key, value in TIED.items() if "head" not in key})


def test_equal_tensors_that_no_model_ties_are_all_written(tmp_path):
    state = {f"experts.{n}.weight": EMBED.clone() for n in range(3)}
    state |= {"norm1.weight": torch.ones(32), "norm2.weight": torch.ones(32), "lm_head.weight": EMBED + 1}
    state["model.embed_tokens.weight"] = EMBED.clone()
    xc.save(state, tmp_path / "checkpoint")
    for number, source in enumerate((state, tmp_path / "checkpoint")):
        assert not xc.export(source, tmp_path / str(number)).tied
        assert_same(written(tmp_path / str(number)), state)


def test_configuration_can_say_that_nothing_is_tied(tmp_path):
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert not xc.export(TIED, tmp_path / "model", config_from=tmp_path).tied
    assert_same(written(tmp_path / "model"), TIED)


def test_tie_that_training_has_broken_is_written_and_named(tmp_path, caplog):
    """On XLA devices, model.to(device) makes two parameters of one: dropping either would lose what it learnt."""

    class Model:
        _tied_weights_keys = ("lm_head.weight",)
        config = None

    class Config:
        tie_word_embeddings = True

        def to_dict(self):
            return {}

        def to_json_string(self, use_diff):
            return "{}"

    model = Model()
    model.config = Config()
    state = {**TIED, "lm_head.weight": EMBED + 1}
    with caplog.at_level(logging.WARNING):
        report = xc.export(state, tmp_path / "model", config_from=model)
    assert not report.tied and "the model ties lm_head.weight" in caplog.text
    assert_same(written(tmp_path / "model"), state)


def test_tied_weights_come_back_into_a_tied_model(tmp_path):
    xc.export(TIED, tmp_path / "model")
    shared = torch.zeros(64, 32)
    target = {"model.embed_tokens.weight": shared, "norm.weight": torch.zeros(32), "lm_head.weight": shared}
    report = xc.load(target, tmp_path / "model")
    assert same_bits(shared, EMBED) and report.renamed == {"lm_head.weight": "model.embed_tokens.weight"}

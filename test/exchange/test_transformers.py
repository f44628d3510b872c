"""Models of transformers go from a mesh into the Hub's format and back, and compute the same logits."""

import pytest
import torch

import torch_xla_ckpt as xc
from support import hugging_face
from support.meshes import holds, mesh

transformers = pytest.importorskip("transformers")

NAMES = ["llama", "mixtral"]


def opened(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.mark.slow
@pytest.mark.parametrize("max_shard_bytes", [5 << 30, 30_000], ids=["one file", "several files"])
@pytest.mark.parametrize("source", ["checkpoint", "live"])
@pytest.mark.parametrize("name", NAMES)
def test_model_trained_on_a_mesh_computes_the_same_logits_in_transformers(tmp_path, name, source, max_shard_bytes):
    model = hugging_face.train(name, mesh((4, 2)))
    expected = hugging_face.on_host(model, name)
    state = {"model": model.state_dict()}
    if source == "checkpoint":
        xc.save(state, tmp_path / "run" / "100")
        state = tmp_path / "run" / "100"
    report = xc.export(state, tmp_path / "hf", key="model", config_from=model, max_shard_bytes=max_shard_bytes)
    assert torch.equal(hugging_face.logits(opened(tmp_path / "hf")), hugging_face.logits(expected))
    assert list(report.tied) == (["lm_head.weight"] if name == "llama" else [])
    assert set(report.copied) == {"config.json", "generation_config.json"}


@pytest.mark.parametrize("max_shard_size", ["5GB", "30KB"])
@pytest.mark.parametrize("name", NAMES)
def test_model_saved_by_transformers_is_restored_onto_a_mesh(tmp_path, name, max_shard_size):
    original = hugging_face.build(name)
    original.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    model = hugging_face.build(name, "meta")
    on = mesh((2, 4))
    report = xc.restore(tmp_path, model=model, sharding=hugging_face.specs(model, on), mesh=on)
    assert not report.missing and not report.unexpected
    assert all(holds(value, original.state_dict()[key]) for key, value in model.state_dict().items())
    assert torch.equal(hugging_face.logits(hugging_face.on_host(model, name)), hugging_face.logits(original))
    if name == "llama":
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert report.renamed["lm_head.weight"] == "model.embed_tokens.weight"


def test_there_and_back_again_is_bit_equal(tmp_path):
    first = hugging_face.train("llama", mesh((4, 2)))
    xc.export({"model": first.state_dict()}, tmp_path / "a", config_from=first)
    second = hugging_face.build("llama", "meta")
    on = mesh((2, 4))
    xc.restore(tmp_path / "a", model=second, sharding=hugging_face.specs(second, on), mesh=on)
    xc.export({"model": second.state_dict()}, tmp_path / "b", config_from=second)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert (tmp_path / "a/config.json").read_bytes() == (tmp_path / "b/config.json").read_bytes()


def test_body_alone_is_restored_from_the_file_of_the_whole_model(tmp_path):
    original = hugging_face.build("mixtral")
    original.save_pretrained(tmp_path)
    body = hugging_face.build("mixtral", "meta").model
    report = xc.restore(tmp_path, model=body, unexpected="ignore")
    assert not report.missing and report.unexpected == ("lm_head.weight",)
    assert all(holds(value, original.model.state_dict()[key]) for key, value in body.state_dict().items())


def test_whole_model_is_cast_for_serving(tmp_path):
    model = hugging_face.build("llama")
    xc.export({"model": model.state_dict()}, tmp_path / "hf", config_from=model, dtype=torch.bfloat16)
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert served.dtype == torch.bfloat16
    assert all(torch.equal(value, model.state_dict()[key].bfloat16()) for key, value in served.state_dict().items())


def test_interrupted_export_is_no_model_for_transformers(tmp_path, monkeypatch):
    """What a killed export can leave: all files of weights, and no index."""
    model = hugging_face.build("llama")
    xc.export({"model": model.state_dict()}, tmp_path / "hf", config_from=model, max_shard_bytes=30_000)
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    with pytest.raises(OSError):
        opened(tmp_path / "hf")


def test_folder_of_a_model_gives_configuration_and_ties(tmp_path):
    model = hugging_face.train("llama", mesh((4, 2)))
    hugging_face.build("llama").save_pretrained(tmp_path / "base")
    xc.save({"model": model.state_dict()}, tmp_path / "checkpoint")
    report = xc.export(tmp_path / "checkpoint", tmp_path / "hf", config_from=tmp_path / "base")
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    expected = hugging_face.on_host(model, "llama")
    assert torch.equal(hugging_face.logits(opened(tmp_path / "hf")), hugging_face.logits(expected))

"""Models of transformers come back from the meta device with the buffers that no checkpoint has."""

import pytest
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

import torch_xla_ckpt as xc

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
COMPUTED = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "llama with scaled frequencies": transformers.LlamaConfig(**LLAMA, rope_scaling=LLAMA3),
    "tied qwen2 with yarn": transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True, rope_scaling=YARN),
    "gpt-neox": transformers.GPTNeoXConfig(**SMALL, intermediate_size=48, max_position_embeddings=64),
}
NOT_COMPUTED = {
    "gpt2": (transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64), "attn.bias"),
    "gemma3": (transformers.Gemma3TextConfig(**LLAMA, head_dim=8), "embed_tokens.embed_scale"),
}


def built(config):
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval()


def saved(config, path):
    torch.manual_seed(0)
    model = built(config)
    xc.save({"model": model.state_dict()}, path)
    return model


def on_meta(config):
    with torch.device("meta"):
        return built(config)


def logits(model):
    tokens = torch.arange(24, device=next(model.parameters()).device).reshape(2, 12)
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


@pytest.fixture
def without_xla(monkeypatch):
    """Restore into host memory, where equal models compute equal bits."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)


@pytest.mark.parametrize("name", COMPUTED)
def test_model_with_rotary_embeddings_computes_the_same_logits(tmp_path, name, without_xla):
    original = saved(COMPUTED[name], tmp_path)
    model = on_meta(COMPUTED[name])
    report = xc.restore(tmp_path, model=model)
    assert not report.missing and not report.unexpected
    assert torch.equal(logits(model), logits(original))


def test_rotary_frequencies_reach_the_devices(tmp_path):
    original = saved(COMPUTED["llama"], tmp_path)
    model = on_meta(COMPUTED["llama"])
    xc.restore(tmp_path, model=model)
    rotary, expected = model.model.rotary_emb, original.model.rotary_emb
    assert rotary.inv_freq.device.type == "xla" and torch.equal(rotary.inv_freq.cpu(), expected.inv_freq)
    assert torch.equal(rotary.original_inv_freq.cpu(), expected.inv_freq)
    assert torch.allclose(logits(model).cpu(), logits(original), atol=1e-5)


@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_buffers_that_a_model_does_not_compute_are_named_with_the_recipe(tmp_path, name, without_xla):
    config, buffer = NOT_COMPUTED[name]
    saved(config, tmp_path)
    model = on_meta(config)
    with pytest.raises(xc.CheckpointError, match=rf"(?s){buffer}.*docs/restoring\.md.*Buffers that no checkpoint has"):
        xc.restore(tmp_path, model=model)
    assert all(param.device.type == "meta" for param in model.parameters())


@pytest.mark.parametrize("device", ["host", "xla"])
@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_model_built_with_the_recipe_for_buffers_comes_back(tmp_path, name, device, request):
    config, _ = NOT_COMPUTED[name]
    original = saved(config, tmp_path)
    if device == "host":
        request.getfixturevalue("without_xla")

    def to_meta(module, name, param):
        if param is None or param.is_meta:
            return param
        return torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    with register_module_parameter_registration_hook(to_meta):
        model = built(config)
    assert {param.device.type for param in model.parameters()} == {"meta"}
    xc.restore(tmp_path, model=model)
    assert len(list(model.parameters())) == len(list(original.parameters()))  # tied weights are still one
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu" if device == "host" else "xla"}
    if device == "host":
        assert torch.equal(logits(model), logits(original))
    else:
        assert torch.allclose(logits(model).cpu(), logits(original), atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt-neox"])
def test_new_head_on_the_meta_device_is_initialized_as_transformers_does(tmp_path, name, without_xla):
    saved(COMPUTED[name], tmp_path)
    config = type(COMPUTED[name])(**{**COMPUTED[name].to_dict(), "vocab_size": 128, "initializer_range": 0.5})
    model = on_meta(config)
    report = xc.restore(tmp_path, model=model, shape="keep")
    assert len(report.kept) == 2 and any("embed" in key for key in report.kept)
    for key in report.kept:
        values = model.get_parameter(key.removeprefix("model."))
        assert 0.4 < values.std().item() < 0.6, "not the normal distribution of _init_weights"
    assert torch.isfinite(logits(model)).all()

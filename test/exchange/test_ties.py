"""Tied weights are written once, under the right name, and only if they have the same bytes."""

import logging

import pytest
import torch

import torch_xla_ckpt as xc
from support.exported import MESH, assert_same, written
from support.meshes import mesh, put, random_bits, same_bits

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


def test_equal_tensors_with_other_chunks_are_tied(tmp_path):
    """Their checksums are of other chunks, so only their bytes can tell."""
    state = {**TIED, "model.embed_tokens.weight": put(EMBED, mesh(MESH), ("a", "b"))}
    xc.save({"model": state}, tmp_path / "checkpoint")
    report = xc.export(tmp_path / "checkpoint", tmp_path / "model")
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_several_groups_of_tied_weights_are_each_written_once(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**small, decoder_start_token_id=0)).eval()
    report = xc.export({"model": model.state_dict()}, tmp_path / "model", config_from=model)
    assert set(report.tied) == {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert set(report.tied.values()) == {"shared.weight"}
    opened = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert_same(opened.state_dict(), model.state_dict())


def test_bert_with_tied_decoder_and_bias_comes_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**small, num_attention_heads=2)).eval()
    xc.export({"model": model.state_dict()}, tmp_path / "model", config_from=model)
    opened = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "model")
    assert_same(opened.state_dict(), model.state_dict())


class TiedModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(64, 32)
        self.norm = torch.nn.Linear(32, 32)
        self.lm_head = torch.nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.emb.weight


@pytest.mark.parametrize("kind", ["host", "live", "checkpoint"])
def test_torch_save_file_has_all_names_of_tied_weights_and_their_bytes_once(tmp_path, kind):
    model = TiedModel()
    source = {"model": model.state_dict()}
    if kind == "live":
        shared = put(model.emb.weight.detach(), mesh(MESH), ("a", "b"))
        source["model"] |= {"emb.weight": shared, "lm_head.weight": shared.detach()}
    if kind == "checkpoint":
        xc.save(source, tmp_path / "checkpoint")
        source = tmp_path / "checkpoint"
    for dtype in (None, torch.bfloat16):
        report = xc.export(source, tmp_path / "model.pt", key="model", format="torch", dtype=dtype)
        assert report.tied == {"lm_head.weight": "emb.weight"}
        loaded = torch.load(tmp_path / "model.pt", weights_only=True)
        assert loaded["lm_head.weight"].data_ptr() == loaded["emb.weight"].data_ptr()
        fresh = TiedModel()
        fresh.load_state_dict(loaded)
        expected = {key: value.to(dtype or value.dtype) for key, value in model.state_dict().items()}
        assert_same(loaded, expected)
        size = sum(value.nbytes for key, value in expected.items() if key != "lm_head.weight")
        assert report.bytes_written == size and (tmp_path / "model.pt").stat().st_size < size + 4000
    found = {"model": {}}
    assert not xc.load(found, tmp_path / "model.pt").missing and xc.verify(tmp_path / "model.pt")
    assert_same(found["model"], expected)

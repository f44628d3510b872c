"""xc explain: what each process of a job would read, and what would happen to each key."""

import json
import sys

import pytest
import torch
import transformers

import torch_xla_ckpt as xc
from support import kinds
from support.command_line import call

pytestmark = pytest.mark.filterwarnings("ignore")
SPECS = ("--spec", "*.weight=fsdp,tensor", "--spec", "*.bias=fsdp")


def test_explain_adds_up_to_the_checkpoint(made):
    found = call("explain", made / "ours", "--mesh", "fsdp=2,tensor=4", *SPECS, "--processes", "4", "--json").json
    assert [one["devices"] for one in found["processes"]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    sharded = 3 * 512 / 4  # two devices of eight
    for one in found["processes"]:
        objects = one["bytes_needed"] - (sharded + 3 * 16 + 4 + 80)
        assert 0 < objects < 20_000
        assert one["bytes_put"] == 3 * 2 * 64 + 3 * 2 * 16 + 2 * (4 + 80)
        assert one["bytes_read"] >= one["bytes_needed"] - objects
    tensors = {one["key"]: one for one in found["tensors"]}
    assert tensors["model.layers.0.weight"]["needed"][1] == {"offsets": [0, 2], "sizes": [8, 2]}


def test_explain_is_what_a_load_reads(made):
    """The plan for one process on one device names the bytes that a load of everything into host memory reads."""
    found = call("explain", made / "ours", "--mesh", "d=1", "--json").json["processes"][0]
    report = xc.load({"model": {}, "steps": None, "epoch": None, "config": {}}, made / "ours")
    assert found["bytes_needed"] == report.bytes_needed
    assert found["bytes_read"] == report.bytes_read


@pytest.mark.parametrize("kind", kinds.CHECKPOINTS)
def test_explain_every_kind(made, kind):
    answer = call("explain", made / kind, "--mesh", "fsdp=8", "--spec", "*.weight=fsdp", "--processes", "8")
    assert answer.status == 0 and "reads/needs" in answer.out


def test_explain_against_another_model_names_every_difference(made, tmp_path):
    other = kinds.host_state()
    other["model"]["layers"]["0"]["weight"] = torch.zeros(16, 9)
    other["model"]["layers"]["1"]["weight"] = torch.zeros(16, 8, dtype=torch.bfloat16)
    other["model"]["head"] = torch.zeros(2)
    del other["epoch"]
    kinds.save_ours(tmp_path / "target", other)
    found = call("explain", made / "ours", "--mesh", "d=1", "--against", tmp_path / "target", "--json").json
    changes = {one["key"]: one["change"] for one in found["changes"]}
    assert changes == {
        "model.layers.0.weight": "other shape",
        "model.layers.1.weight": "cast",
        "model.head": "missing",
    }
    assert any("would fail because of 2 keys" in warning for warning in found["warnings"])
    assert any("does not name" in warning and "'epoch'" in warning for warning in found["warnings"])


@pytest.mark.slow
def test_explain_draws_a_plan(made, tmp_path):
    call("explain", made / "ours", "--mesh", "a=2,b=2", "--spec", "*.weight=a,b", "-o", tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options",
    [
        ("--mesh", "fsdp"),
        ("--mesh", "fsdp=0"),
        ("--mesh", "a=2,a=2"),
        ("--mesh", "a=9999999999"),
        ("--mesh", "a=2", "--spec", "*.weight"),
        ("--mesh", "a=2", "--spec", "*.weight=b"),
        ("--mesh", "a=2", "--spec", "*.weight=a,a"),
        ("--mesh", "a=2", "--spec", "*.bias=-,a"),
        ("--mesh", "a=2", "--spec", "nothing.*=a"),
        ("--mesh", "a=2", "--processes", "3"),
        ("--mesh", "a=2", "--processes", "0"),
    ],
)
def test_explain_refuses_what_does_not_fit(made, options):
    answer = call("explain", made / "ours", *options)
    assert answer.status == 2 and len(answer.err.splitlines()) == 1, answer.err


def test_uneven_cuts_are_those_of_the_devices(tmp_path):
    """The boxes of a plan are the boxes that torch_xla's devices hold."""
    from support.meshes import mesh, put, settle
    from torch_xla_ckpt.device import access_of
    from torch_xla_ckpt.inspecting.meshes import MeshPlan

    for shape, text, spec in [
        ((10, 7), "a,b", ("a", "b")),
        ((10, 7), "-,a+b", (None, ("a", "b"))),
        ((3,), "a", ("a",)),
        ((5, 4), "b+a,-", (("b", "a"), None)),
    ]:
        tensor = put(torch.zeros(shape), mesh((4, 2)), spec)
        settle()
        live = [shard.box for shard in access_of(tensor).layout(tensor).shards]
        assert MeshPlan.parse("a=4,b=2", [f"w={text}"]).boxes("w", shape) == live


def test_explain_says_what_a_load_would_create_and_leave_out(tmp_path):
    """What the plan says of each key is what a load into that target then does."""
    state = kinds.host_state()
    state["model"]["head"] = torch.ones(3)
    state["optim"] = {"state": {"0": torch.ones(2)}}
    kinds.save_ours(tmp_path / "a", state)
    target = kinds.host_state()
    kinds.save_ours(tmp_path / "b", target)
    found = call("explain", tmp_path / "a", "--mesh", "d=2", "--against", tmp_path / "b", "--json").json
    report = xc.load(target, tmp_path / "a")
    assert [(one["key"], one["change"]) for one in found["changes"]] == [("model.head", "created")]
    assert report.created == ("model.head",) and "optim.state.0" in report.not_requested
    assert "model.head" not in {one["key"] for one in found["tensors"]}
    assert all(one["bytes_needed"] == found["processes"][0]["bytes_needed"] for one in found["processes"])


@pytest.mark.parametrize("kind", ["safetensors", "safetensors-file"])
def test_explain_against_a_model_s_folder_finds_the_model_in_the_checkpoint(made, tmp_path, kind):
    state = {"net": kinds.host_state(), "other": torch.zeros(5)}
    del state["net"]["steps"]
    state["net"]["extra"] = torch.zeros(2)
    kinds.save_ours(tmp_path / "c", state)
    found = call("explain", tmp_path / "c", "--mesh", "d=1", "--against", made / kind, "--json").json
    changes = {one["key"]: one["change"] for one in found["changes"]}
    assert changes["net.steps"] == "missing" and changes["net.extra"] == "unexpected"
    assert set(changes) == {"net.steps", "net.extra", "net.epoch", "net.config.name", "net.config.sizes"}
    assert {one["key"] for one in found["tensors"]} == {f"net.{key}" for key in (*kinds.KEYS, "model.scale")}


@pytest.fixture
def llama(tmp_path):
    """A folder with the configuration of a small model, and the model."""
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=24
    )
    config.architectures = ["LlamaForCausalLM"]
    config.tie_word_embeddings = True
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path / "config")
    return tmp_path / "config", transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("name", ["", "config.json"])
def test_explain_against_a_configuration(llama, tmp_path, name):
    folder, model = llama
    state = model.state_dict()
    state["model.norm.weight"] = torch.zeros(17)
    kinds.save_ours(tmp_path / "c", {"model": state, "step": 1})
    found = call("explain", tmp_path / "c", "--mesh", "d=2", "--against", folder / name, "--json").json
    changes = {one["key"]: (one["change"], one["target"]) for one in found["changes"]}
    assert changes.pop("model.model.norm.weight") == ("other shape", "bfloat16 16")
    assert changes.pop("model.model.embed_tokens.weight") == ("cast", "bfloat16 24x16")
    assert {change for change, _ in changes.values()} == {"cast"}


def test_explain_against_a_configuration_without_transformers_or_with_a_strange_one(llama, made, tmp_path, monkeypatch):
    folder, _ = llama
    config = json.loads((folder / "config.json").read_text())
    for edit in (
        {"model_type": "nothing"},
        {"architectures": ["os.system"]},
        {"architectures": None},
        {"auto_map": {}},
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **edit}))
        answer = call("explain", made / "ours", "--mesh", "d=1", "--against", tmp_path / "config.json")
        assert answer.status == (0 if "auto_map" in edit else 2), answer.err
        assert len(answer.err.splitlines()) <= 1
    (tmp_path / "config.json").write_text("[")
    assert call("explain", made / "ours", "--mesh", "d=1", "--against", tmp_path / "config.json").status == 2
    monkeypatch.setitem(sys.modules, "transformers", None)
    answer = call("explain", made / "ours", "--mesh", "d=1", "--against", folder)
    assert answer.status == 2 and "pip install transformers" in answer.err


def notes_of(path, *options):
    return [one for one in call("explain", path, *options, "--json").json["warnings"] if "times what it needs" in one]


def test_advice_to_convert_is_given_only_where_it_helps(tmp_path):
    kinds.save_ours(tmp_path / "small", {f"w{n}": torch.ones(8, 8) for n in range(5)})
    (note,) = notes_of(tmp_path / "small", "--mesh", "a=1")
    assert "header" in note and "cut otherwise" not in note and "would not change" in note

    kinds.save_ours(tmp_path / "large", {"w": torch.ones(2048, 1024)})
    fsdp = ("--mesh", "a=8", "--spec", "w=-,a", "--processes", "8")
    (note,) = notes_of(tmp_path / "large", *fsdp)
    assert "cut otherwise" in note and "'xc convert'" in note
    before = call("explain", tmp_path / "large", *fsdp, "--json").json["processes"][0]["bytes_read"]
    assert call("convert", tmp_path / "large", tmp_path / "fits", "--mesh", "a=8", "--spec", "w=-,a").status == 0
    assert call("explain", tmp_path / "fits", *fsdp, "--json").json["processes"][0]["bytes_read"] < before / 4
    assert notes_of(tmp_path / "fits", *fsdp) == []


def test_advice_for_small_tensors_is_the_same_before_and_after_convert(tmp_path):
    kinds.save_ours(tmp_path / "a", {f"w{n}": torch.ones(16, 4) for n in range(4)} | {"step": 1})
    mesh = ("--mesh", "a=4", "--spec", "w*=a")
    assert call("convert", tmp_path / "a", tmp_path / "b", *mesh).status == 0
    for name in "ab":
        for note in notes_of(tmp_path / name, *mesh):
            assert "would not change" in note, name

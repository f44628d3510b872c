"""Calls with arguments of the wrong kind: the error names the argument and the right call, and nothing is changed."""

import pytest
import torch

import torch_xla_ckpt as xc

MODEL = torch.nn.Linear(2, 2)
STATE = {"model": MODEL.state_dict()}


@pytest.mark.parametrize("state", [MODEL, [1, 2], torch.ones(2), torch.optim.SGD(MODEL.parameters(), lr=1)])
def test_a_state_that_is_no_dict_is_refused(tmp_path, state):
    for call in (xc.save, xc.async_save, xc.load):
        with pytest.raises((TypeError, xc.CheckpointError), match=r"a state is a dict, not a .*model\.state_dict\(\)"):
            call(state, tmp_path / "c")
    assert not (tmp_path / "c" / ".metadata").exists()


def test_state_and_path_in_the_wrong_order_are_refused(tmp_path):
    for call in (xc.save, xc.async_save, xc.load):
        with pytest.raises(TypeError, match=r"a path is a str or an os\.PathLike, not a dict"):
            call(str(tmp_path), STATE)


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": STATE["model"]},
        {"model": torch.nn.Linear},
        {"optimizer": MODEL},
        {"optimizer": torch.optim.AdamW},
        {"state": [1]},
        {"model": MODEL, "sharding": "fsdp"},
        {"model": MODEL, "sharding": ("fsdp", None)},
        {"model": MODEL, "sharding": [("*", ("fsdp",))]},
        {"model": MODEL, "sharding": True},
        {"model": MODEL, "placement": "xla"},
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(tmp_path, arguments):
    xc.save(STATE, tmp_path)
    name = list(arguments)[-1]
    with pytest.raises(TypeError, match=f"{name}= takes .* Nothing was changed"):
        xc.restore(tmp_path, **arguments)


def test_a_load_into_an_empty_state_dict_warns_that_nothing_was_loaded(tmp_path, caplog):
    xc.save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path)
    assert xc.load({}, tmp_path).not_requested == ("model.w", "step")
    assert caplog.text.count("the state dict is empty, so nothing was loaded") == 1
    caplog.clear()
    state = {"model": {}}
    xc.load(state, tmp_path)
    assert state["model"]["w"].tolist() == [1, 1] and "dict is empty" not in caplog.text


def test_a_mesh_without_a_sharding_is_told(tmp_path, caplog):
    xc.save(STATE, tmp_path)
    xc.restore(tmp_path, model=torch.nn.Linear(2, 2), mesh=object())
    assert "was given a mesh and no sharding" in caplog.text

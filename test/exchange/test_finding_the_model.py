"""xc.export without key=: the model is found whole, and every tensor beside it is named."""

import logging

import pytest
import torch

import torch_xla_ckpt as xc
from support.command_line import call
from support.exported import written

ONE = torch.ones(2)
OPTIM = {"state": {0: {"exp": torch.ones(2)}}, "param_groups": [{"lr": 1.0}]}


@pytest.fixture(params=["live", "checkpoint", "torch.save"])
def stored(request, tmp_path):
    """A function that returns a source with a state."""

    def store(state):
        if request.param == "checkpoint":
            xc.save(state, tmp_path / "checkpoint")
            return tmp_path / "checkpoint"
        if request.param == "torch.save":
            torch.save(state, tmp_path / "state.pt")
            return tmp_path / "state.pt"
        return state

    return store


@pytest.mark.parametrize(
    "state, names",
    [
        ({"encoder": {"w": ONE}, "proj": ONE}, {"encoder.w", "proj"}),
        ({"wte": ONE, "layers": {"0": {"w": ONE}}, "head": ONE}, {"wte", "layers.0.w", "head"}),
        ({"encoder": {"w": ONE, "_extra_state": b"x"}, "_extra_state": b"y", "proj": ONE}, {"encoder.w", "proj"}),
    ],
)
def test_nested_model_is_written_whole(tmp_path, caplog, stored, state, names):
    with caplog.at_level(logging.WARNING, "torch_xla_ckpt.exchange"):
        report = xc.export(stored(state), tmp_path / "model")
    assert set(written(tmp_path / "model")) == names == set(report.tensors)
    assert not report.unselected and "no key=" not in caplog.text


def test_tensors_beside_the_model_are_named_and_warned_of(tmp_path, caplog, stored):
    state = {"model": {"w": ONE}, "ema_model": {"w": ONE, "v": ONE}, "optim": OPTIM, "rng": ONE, "step": 1}
    with caplog.at_level(logging.WARNING, "torch_xla_ckpt.exchange"):
        report = xc.export(stored(state), tmp_path / "model")
    assert set(written(tmp_path / "model")) == {"w"} and report.tensors == {"w": "model.w"}
    assert set(report.unselected) == {"ema_model.w", "ema_model.v", "optim.state.0.exp", "rng"}
    assert "ema_model (2)" in str(report) and "optim (1)" in str(report) and "rng (1)" in str(report)
    assert "taken 'model'" in caplog.text and "ema_model (2 tensors), rng (1 tensor)" in caplog.text
    assert "optim" not in caplog.text  # nobody expects an optimizer's state in a model
    caplog.clear()
    report = xc.export(stored(state), tmp_path / "ema", key="ema_model")
    assert "model.w" in report.unselected and "no key=" not in caplog.text


def test_tensors_beside_a_model_with_an_optimizer_are_training_state(tmp_path, caplog, stored):
    state = {"net": {"w": ONE}, "optim": {"state": {}, "param_groups": [{"lr": 1.0}]}, "rng": ONE}
    report = xc.export(stored(state), tmp_path / "model")
    assert set(written(tmp_path / "model")) == {"w"} and report.unselected == ("rng",)
    assert "rng (1 tensor)" in caplog.text


@pytest.mark.parametrize(
    "state, candidates",
    [
        ({"net": {"w": ONE}, "rng": ONE, "epoch": 3}, "'net', 'rng'"),  # rng may be the model's, or the program's
        ({"net": {"w": ONE}, "teacher": {"w": ONE}, "optim": OPTIM}, "'net', 'teacher'"),
        ({"model": {"w": ONE}, "state_dict": {"w": ONE}}, "'model', 'state_dict'"),
    ],
)
def test_source_that_leaves_the_model_open_is_an_error(tmp_path, stored, state, candidates):
    with pytest.raises(xc.CheckpointError, match=f"cannot tell which key holds the model. Candidates: {candidates}"):
        xc.export(stored(state), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_patterns_name_what_they_leave_out_without_a_warning(tmp_path, caplog):
    report = xc.export({"model": {"a": ONE, "b": ONE}}, tmp_path / "model", exclude="*.b")
    assert report.unselected == ("model.b",) and "not selected" in str(report)
    assert "no key=" not in caplog.text


@pytest.mark.parametrize("command", [["export"], ["convert", "--to", "safetensors"]])
def test_command_shows_what_is_beside_the_model(tmp_path, command):
    torch.save({"model": {"w": ONE}, "ema_model": {"w": ONE}}, tmp_path / "state.pt")
    answer = call(*command, tmp_path / "state.pt", tmp_path / "model")
    assert answer.status == 0 and "ema_model (1)" in answer.out

"""Optimizer state that a load creates whole, beside sharded parameters, is named in one warning."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support.meshes import mesh, put, settle

ON = mesh((4, 2))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint of a model and of Adam's state for it."""
    folder = tmp_path_factory.mktemp("saved")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    xc.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, folder)
    return folder


def target(spec, prime=lambda optimizer: optimizer):
    """A model on the devices, and an optimizer that has made no step."""
    model = {"weight": put(torch.zeros(8, 8), ON, spec), "bias": put(torch.zeros(8), ON, None)}
    optimizer = torch.optim.Adam([torch.nn.Parameter(tensor) for tensor in model.values()])
    settle()
    return {"model": model, "optim": prime(optimizer).state_dict()}


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "torch_xla_ckpt")
    return lambda: [record.getMessage() for record in caplog.records if "optimizer state" in record.getMessage()]


@pytest.mark.parametrize("call", ["xc", "dcp"])
def test_one_warning_names_unsharded_optimizer_state_and_the_remedies(path, warnings, call):
    state = target(("a", "b"))
    if call == "xc":
        report = xc.load(state, path)
        assert "optim.state.0.exp_avg" in report.created
    else:
        dcp.load(state, checkpoint_id=path, planner=xc.SPMDLoadPlanner())
    assert state["optim"]["state"][0]["exp_avg"].device.type == "cpu"
    (warning,) = warnings()
    assert "optim.state.0.exp_avg" in warning and "step" not in warning
    assert all(remedy in warning for remedy in ("torch_xla_ckpt.restore(", "prime_optimizer", "placement="))


def test_no_warning_if_placement_creates_the_state_or_the_state_exists(path, warnings):
    state = target(("a", "b"))
    xc.load(state, path, placement=lambda key, shape, dtype: (ON, ("a", "b")) if len(shape) == 2 else None)
    xc.load(state, path)  # into the state that the first load has created
    assert warnings() == []


def test_no_warning_if_parameters_are_not_sharded_or_no_optimizer_state_is_created(path, warnings):
    xc.load(target((None, None)), path)
    xc.load({**target(("a", "b")), "optim": {}}, path, exclude="optim.*")
    xc.load({"model": {"weight": put(torch.zeros(8, 8), ON, ("a", "b"))}}, path)
    xc.load({"optim": {"state": {}}}, path)
    assert warnings() == []


def test_no_warning_from_restore(path, warnings):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    xc.restore(path, model=model, optimizer=optimizer, mesh=ON, sharding={"weight": ("a", "b"), "bias": ("a",)})
    assert optimizer.state[model.weight]["exp_avg"].device.type == "xla" and warnings() == []


def test_no_warning_if_the_optimizer_is_primed(path, warnings):
    state = target(("a", "b"), xc.prime_optimizer)
    xc.load(state, path)
    assert state["optim"]["state"][0]["exp_avg"].any() and warnings() == []


def test_state_dict_of_a_primed_optimizer_is_saved_like_any_other(tmp_path):
    state = xc.prime_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])).state_dict()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["state"] == {}
    xc.save({"optim": state}, tmp_path / "ours")
    dcp.save({"optim": state}, checkpoint_id=tmp_path / "stock")
    for folder in (tmp_path / "ours", tmp_path / "stock"):
        loaded = {"optim": {"param_groups": []}}
        xc.load(loaded, folder)
        assert loaded["optim"]["param_groups"][0]["lr"] == 0.001

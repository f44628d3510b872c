"""docs/leaving.md: every program runs with the newest torch, without torch_xla, on what torch_xla's users have."""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint

import torch_xla_ckpt as xc
from support import interpreters
from support.meshes import mesh, put, same_bits
from support.paths import ROOT, newer_python

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The function definition for SavePlanner")]

PAGE = (ROOT / "docs" / "leaving.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
SPECS = {"0.weight": ("a", "b"), "2.weight": ("b", "a"), "0.bias": (("a", "b"),), "2.bias": None}


# What torchrun does with --standalone, but ranks are forks of the launcher, which has imported torch.
TORCHRUN = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def rank(path):
    runpy.run_path(path, run_name="__main__")


ranks = int(sys.argv[2])
places = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "ranks"}
elastic_launch(LaunchConfig(1, 1, ranks, start_method="fork", max_restarts=0, **places), rank)(sys.argv[1])
"""


def build():
    names = {}
    exec(PROGRAMS["model"], names)
    torch.manual_seed(1)
    return names["build"]()


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture
def folder(tmp_path, model):
    """What torch_xla's users have: our save, and a wrapped model with its optimizer by torch_xla's planner."""
    on = mesh((4, 2))
    live = {key: put(value, on, SPECS[key]) for key, value in model.state_dict().items()}
    xc.save({"model": live, "step": 7}, tmp_path / "checkpoint")
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optim.step = lambda: None
    state = {n: {"step": torch.tensor(1.0), "exp_avg": p.grad, "exp_avg_sq": p.grad**2} for n, p in _numbered(model)}
    wrapped = {
        "model": {f"_orig_module.{key}": value for key, value in live.items()},
        "optim": {"state": state, "param_groups": optim.state_dict()["param_groups"]},
    }
    dcp.save(wrapped, checkpoint_id=tmp_path / "wrapped", planner=torch_xla_checkpoint.SPMDSavePlanner(), no_dist=True)
    return tmp_path


def _numbered(model):
    return enumerate(model.parameters())


def run(folder, name, ranks=1):
    """Run a program of the page in a folder, as its reader would."""
    for other in ("model", name):
        (folder / f"{other}.py").write_text(PROGRAMS[other])
    command = ["-c", TORCHRUN, f"{name}.py", ranks] if ranks > 1 else [f"{name}.py"]
    code = "import importlib.util; assert importlib.util.find_spec('torch_xla') is None"
    for program in (["-c", code], command):
        done = interpreters.run(
            program,
            env={"PYTHONPATH": f"{ROOT}:{folder}"},
            modules=interpreters.STOCK,
            python=newer_python(),
            cwd=folder,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def assert_model(state, model):
    assert state.keys() == model.state_dict().keys()
    assert all(same_bits(state[key].detach(), value) for key, value in model.state_dict().items())


def test_every_program_of_the_page_is_run_here():
    assert set(PROGRAMS) == {
        "model",
        "to_fsdp2",
        "to_dtensor",
        "to_safetensors",
        "to_torch_save",
        "to_torch_save_stock",
        "to_lightning",
    }


@pytest.mark.parametrize("name, result", [("to_fsdp2", "fsdp2"), ("to_dtensor", "dtensor")])
def test_two_ranks_load_onto_dtensors_and_save(folder, model, name, result):
    run(folder, name, ranks=2)
    state = {"model": {}}
    xc.load(state, folder / result)
    assert_model(state["model"], model)
    if name == "to_dtensor":
        optim = {"optim": {}}
        xc.load(optim, folder / result)
        for number, param in _numbered(model):
            assert torch.equal(optim["optim"]["state"][number]["exp_avg"], param.grad)


def test_safetensors_have_the_model(folder, model):
    run(folder, "to_safetensors")
    state = {"model": {}}
    xc.load(state, folder / "hf-model")
    assert_model(state["model"], model)


def test_torch_save_has_the_model(folder, model):
    run(folder, "to_torch_save")
    assert_model(torch.load(folder / "model.pt", weights_only=True), model)


def test_stock_torch_converts_everything(folder, model):
    run(folder, "to_torch_save_stock")
    everything = torch.load(folder / "everything.pt", weights_only=True)
    assert_model(everything["model"], model)
    assert everything["step"] == 7


def test_lightning_file_has_the_model_and_comes_back(folder, model):
    run(folder, "to_lightning")
    checkpoint = torch.load(folder / "lightning.ckpt", weights_only=True)
    assert_model({key.removeprefix("net."): value for key, value in checkpoint["state_dict"].items()}, model)
    assert checkpoint["global_step"] == 7
    wrapper = torch.nn.Module()
    wrapper.net = build()
    xc.restore(folder / "lightning.ckpt", model=wrapper, model_key="state_dict")
    assert_model(wrapper.net.state_dict(), model)

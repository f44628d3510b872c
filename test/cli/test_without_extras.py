"""The command line and the functions behind it without torch_xla on the newest torch, and without click and rich."""

import subprocess
import sys

import pytest

import torch_xla_ckpt as xc
from support.paths import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ASK = """
import sys
import torch_xla_ckpt as xc
ours, stock = sys.argv[1:]
print(xc.inspect(ours))
print(xc.inspect(stock).tree())
print(xc.explain(ours, "a=2,b=2", ["*.weight=a,b"], processes=2))
assert not xc.diff(ours, ours) and xc.verify(ours)
assert not xc.diff(ours, stock, "model.*")
assert not {"torch_xla", "click", "rich", "matplotlib"} & set(sys.modules)
"""
WITHOUT = """
import importlib.abc, runpy, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == {!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
runpy.run_module("torch_xla_ckpt", run_name="__main__")
"""


@pytest.fixture(scope="module")
def newer():
    """The Python of an environment with the newest torch, click and rich, and without torch_xla and matplotlib."""
    done = subprocess.run([ROOT / "scripts" / "env", "newer"], stdout=subprocess.PIPE, text=True, timeout=280)
    assert done.returncode == 0, "scripts/env newer failed"
    return done.stdout.strip()


def run(python, *command):
    variables = {**environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.run([python, *map(str, command)], capture_output=True, text=True, env=variables, timeout=120)


def test_functions_need_neither_torch_xla_nor_the_extra(newer, made):
    done = run(newer, "-c", ASK, made / "ours", made / "stock")
    assert done.returncode == 0, done.stderr
    assert "model.layers.{0..2}.weight" in done.stdout


@pytest.mark.parametrize("package", ["click", "rich"])
def test_without_the_extra_one_line_names_it(newer, made, package):
    done = run(newer, "-c", WITHOUT.format(package), "ls", made / "ours")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "torch_xla_ckpt[cli]" in done.stderr and package in done.stderr


def test_commands_run_on_the_newest_torch(newer, made, tmp_path):
    for arguments, status in (
        (("ls", made / "ours"), 0),
        (("ls", made / "run"), 0),
        (("show", made / "stock", "model.layers.0.weight[0]"), 0),
        (("verify", made / "ours", made / "stock", made / "lightning", made / "torch", made / "safetensors"), 0),
        (("diff", made / "ours", made / "stock", "steps"), 0),
        (("explain", made / "ours", "--mesh", "a=2"), 0),
        (("report", made / "ours", "-o", tmp_path / "r.html"), 0),
        (("convert", made / "ours", tmp_path / "c", "--mesh", "a=2", "--spec", "*.weight=a"), 0),
        (("diff", made / "ours", tmp_path / "c"), 0),
        (("export", tmp_path / "c", tmp_path / "hf", "--key", "model"), 0),
        (("prune", made / "run", "--keep", "latest:1"), 0),
        (("ls", tmp_path / "absent"), 2),
    ):
        done = run(newer, "-m", "torch_xla_ckpt", *arguments)
        assert done.returncode == status, (arguments, done.stderr)
    assert not xc.diff(made / "ours", tmp_path / "c")  # what the newest torch wrote opens here


def test_pictures_without_matplotlib_name_the_extra(newer, made, tmp_path):
    command = ("show", made / "ours", "model.layers.0.weight", "-o", tmp_path / "x.png")
    done = run(newer, "-m", "torch_xla_ckpt", *command)
    assert done.returncode == 2 and "torch_xla_ckpt[cli]" in done.stderr and len(done.stderr.splitlines()) == 1


def test_importing_the_package_imports_none_of_the_extra():
    code = "import sys, torch_xla_ckpt; assert not {'click', 'rich', 'matplotlib'} & set(sys.modules)"
    assert run(sys.executable, "-c", code).returncode == 0

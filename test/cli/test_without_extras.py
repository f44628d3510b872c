"""The command line and the functions behind it without torch_xla on the newest torch, and without click and rich."""

import json
import subprocess

import pytest

import torch_xla_ckpt as xc
from support import interpreters
from support.paths import environment, newer_python

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


def run(*command):
    """Run a program with the newest torch. torch is imported when the program starts, and this package is not."""
    return interpreters.run(command, python=newer_python(), modules=interpreters.STOCK)


def test_functions_need_neither_torch_xla_nor_the_extra(made):
    command = [newer_python(), "-c", ASK, str(made / "ours"), str(made / "stock")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "model.layers.{0..2}.weight" in done.stdout


@pytest.mark.parametrize("package", ["click", "rich"])
def test_without_the_extra_one_line_names_it(made, package):
    done = run("-c", WITHOUT.format(package), "ls", made / "ours")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "torch_xla_ckpt[cli]" in done.stderr and package in done.stderr


COMMANDS = """
import json, sys
from torch_xla_ckpt.cli import main

for arguments, status in json.loads(sys.argv[1]):
    sys.argv = ["xc", *arguments]
    try:
        main()
    except SystemExit as end:
        assert end.code == status, (arguments, end.code)
    else:
        raise AssertionError(f"{arguments} has no exit status")
"""


def test_commands_run_on_the_newest_torch(made, tmp_path):
    commands = (
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
    )
    done = run("-c", COMMANDS, json.dumps(commands, default=str))
    assert done.returncode == 0, done.stderr
    assert not xc.diff(made / "ours", tmp_path / "c")  # what the newest torch wrote opens here


def test_pictures_without_matplotlib_name_the_extra(made, tmp_path):
    command = ("show", made / "ours", "model.layers.0.weight", "-o", tmp_path / "x.png")
    done = run("-m", "torch_xla_ckpt", *command)
    assert done.returncode == 2 and "torch_xla_ckpt[cli]" in done.stderr and len(done.stderr.splitlines()) == 1


def test_importing_the_package_imports_none_of_the_extra():
    code = "import sys, torch_xla_ckpt; assert not {'click', 'rich', 'matplotlib'} & set(sys.modules)"
    assert interpreters.run(["-c", code], modules=interpreters.STOCK).returncode == 0

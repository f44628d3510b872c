"""The command line and the functions behind it without torch_xla on the newest torch, and without click and rich."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import torch_xla_ckpt as xc
from support import kinds
from support.paths import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PURE = ("click", "rich", "markdown_it", "mdurl", "pygments")  # what the commands need, without pictures

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


@pytest.fixture(scope="module")
def newer():
    """The Python of an environment with the newest torch, and without torch_xla and the extra's packages."""
    done = subprocess.run([ROOT / "scripts" / "env", "newer"], stdout=subprocess.PIPE, text=True, timeout=280)
    assert done.returncode == 0, "scripts/env newer failed"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    kinds.save_ours(folder / "ours")
    kinds.save_stock(folder / "stock")
    return folder


def run(python, path, *command):
    variables = {**environment(), "PYTHONPATH": path}
    return subprocess.run([python, *map(str, command)], capture_output=True, text=True, env=variables, timeout=120)


def test_functions_need_neither_torch_xla_nor_the_extra(newer, made):
    done = run(newer, str(ROOT), "-c", ASK, made / "ours", made / "stock")
    assert done.returncode == 0, done.stderr
    assert "model.layers.{0..2}.weight" in done.stdout


def test_without_the_extra_one_line_names_it(newer, made):
    done = run(newer, str(ROOT), "-m", "torch_xla_ckpt", "ls", made / "ours")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "torch_xla_ckpt[cli]" in done.stderr


def test_commands_run_on_the_newest_torch(newer, made, tmp_path):
    for name in PURE:
        (tmp_path / name).symlink_to(Path(importlib.util.find_spec(name).origin).parent)
    path = f"{ROOT}:{tmp_path}"
    for arguments, status in (
        (("ls", made / "ours"), 0),
        (("show", made / "stock", "model.layers.0.weight[0]"), 0),
        (("verify", made / "ours", made / "stock"), 0),
        (("diff", made / "ours", made / "stock", "steps"), 0),
        (("explain", made / "ours", "--mesh", "a=2"), 0),
        (("report", made / "ours", "-o", tmp_path / "r.html"), 0),
        (("convert", made / "ours", tmp_path / "c", "--mesh", "a=2", "--spec", "*.weight=a"), 0),
        (("diff", made / "ours", tmp_path / "c"), 0),
        (("ls", tmp_path / "absent"), 2),
    ):
        done = run(newer, path, "-m", "torch_xla_ckpt", *arguments)
        assert done.returncode == status, (arguments, done.stderr)
    assert not xc.diff(made / "ours", tmp_path / "c")  # what the newest torch wrote opens here


def test_pictures_without_matplotlib_name_the_extra(newer, made, tmp_path):
    for name in PURE:
        (tmp_path / name).symlink_to(Path(importlib.util.find_spec(name).origin).parent)
    command = ("show", made / "ours", "model.layers.0.weight", "--layout", "-o", tmp_path / "x.png")
    done = run(newer, f"{ROOT}:{tmp_path}", "-m", "torch_xla_ckpt", *command)
    assert done.returncode == 2 and "torch_xla_ckpt[cli]" in done.stderr and len(done.stderr.splitlines()) == 1


def test_importing_the_package_imports_none_of_the_extra():
    code = "import sys, torch_xla_ckpt; assert not {'click', 'rich', 'matplotlib'} & set(sys.modules)"
    assert run(sys.executable, str(ROOT), "-c", code).returncode == 0

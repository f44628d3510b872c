"""README.md and docs/: every snippet runs as it stands, every path exists, and docs/api.md has every public name."""

import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_xla_ckpt as xc
from support.meshes import mesh, put, random_bits
from support.paths import ROOT
from support.s3 import Server
from torch_xla_ckpt import testing

pytestmark = pytest.mark.slow

README = ROOT / "README.md"
API = ROOT / "docs" / "api.md"
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
# A program of scripts/ in backquotes or in an indented block, with or without arguments.
PROGRAM = re.compile(r"(?:^ {4}|`)(?:\./)?(scripts/[\w./-]+)", re.MULTILINE)


def run_snippets(page: Path) -> dict:
    """Run all Python blocks of a page in order, as a reader would paste them, and return their names."""
    text = page.read_text(encoding="utf-8")
    names = {"__name__": "__main__"}
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        above = "\n" * text[: match.start(1)].count("\n")  # so that a traceback shows the page's own lines
        exec(compile(above + match[1], str(page), "exec"), names)
    return names


def test_every_snippet_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)  # with these weights, the last step has the best loss
    with Server() as s3, s3.bucket("bucket"):
        monkeypatch.setenv("S3_ENDPOINT", s3.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        names = run_snippets(README)
    weights = {"model": {}}
    xc.load(weights, "run/24")
    assert names["manager"].all_steps() == [10, 20, 24] and names["scheduler"].last_epoch == 25
    # The recipe with a new head loaded the body from the first checkpoint, and left the head alone.
    assert torch.equal(names["weights"]["model"]["0.weight"], names["model"][0].weight.cpu())
    assert not torch.equal(names["weights"]["model"]["0.weight"], weights["model"]["0.weight"])
    assert names["model"][1].weight.shape == (10, 512)


def test_the_readme_is_at_most_120_lines_long():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


def test_every_snippet_of_the_api_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(API)


def test_the_api_has_a_line_and_an_example_for_every_public_name():
    text = API.read_text(encoding="utf-8")
    parts = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE))
    public = {*xc.__all__, *testing.__all__}
    assert set(parts) == public, f"missing: {public - set(parts)}; no public names: {set(parts) - public}"
    for name, part in parts.items():
        line, found, _ = part.strip().partition("\n\n```python\n")
        assert line and not line.startswith("`") and found, f"{name} needs a line and an example"


@pytest.mark.parametrize("module, base", [(xc.keep, "Keep"), (xc.when, "When")], ids=["keep", "when"])
def test_the_api_names_every_policy(module, base):
    name = base.lower()
    (part,) = re.findall(rf"^### `{name}`\n(.*?)(?=^##|\Z)", API.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    classes = inspect.getmembers(module, inspect.isclass)
    policies = {one for one, value in classes if issubclass(value, getattr(module, base))}
    for policy in policies - {base, "AnyOf", "Where"}:  # programs make these two from | and from functions
        assert f"`{policy}`" in part and f"xc.{name}.{policy}(" in part, policy


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs_and_finds_its_own_result_right(example, capsys):
    runpy.run_path(str(example), run_name="__main__")
    assert "OK: " in capsys.readouterr().out


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_chooses_virtual_devices_before_it_imports_torch_xla(example):
    before = example.read_text(encoding="utf-8").partition("import torch_xla")[0]
    for variable, value in (("PJRT_DEVICE", "CPU"), ("CPU_NUM_DEVICES", "8")):
        assert f'os.environ.setdefault("{variable}", "{value}")' in before


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_path_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        assert (page.parent / link).exists(), link
    for program in PROGRAM.findall(text):
        assert (ROOT / program).exists(), program


@pytest.mark.parametrize("linter", ["-m ruff check .", "-m ruff format --check .", "-m mypy", "lint-imports"])
def test_pre_commit_runs_the_linters_of_scripts_test(linter):
    for name in ("scripts/test", ".pre-commit-config.yaml"):
        assert linter in (ROOT / name).read_text(encoding="utf-8").replace('"', ""), name


def test_the_map_of_rooms_is_up_to_date():
    program = runpy.run_path(str(ROOT / "scripts" / "map_of_rooms.py"))
    assert program["PAGE"].read_text(encoding="utf-8") == program["page"](), "run: python3 scripts/map_of_rooms.py"


def test_the_reader_in_format_md_reads_with_numpy_alone(tmp_path):
    """The specification is enough to read the tensors."""
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    state = {"grid": put(random_bits((9, 7), torch.int32), mesh((4, 2)), ("a", "b")), "n": {"x": torch.tensor(3)}}
    xc.save(state, tmp_path / "checkpoint")
    check = (
        "import sys; assert 'torch' not in sys.modules; assert tensors['n.x'] == 3; "
        "np.save('grid.npy', tensors['grid'])"
    )
    subprocess.run([sys.executable, "-c", f"{example}\n{check}"], cwd=tmp_path, check=True, timeout=60)
    assert (np.load(tmp_path / "grid.npy") == random_bits((9, 7), torch.int32).numpy()).all()

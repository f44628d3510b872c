"""What the README and docs/format.md show works when it is pasted."""

import re
import subprocess
import sys

import numpy as np
import torch

import torch_xla_ckpt as xc
from support.meshes import mesh, put, random_bits
from support.paths import ROOT, environment

README = ROOT / "README.md"


def test_the_example_runs_as_it_stands(tmp_path):
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    program = example + "\nassert state['step'] == 7 and (state['model']['weight'] == model.weight).all().item()\n"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), check=True, timeout=120)


def test_every_path_it_names_exists():
    named = re.findall(r"\]\(([^)]+)\)|`(?:\./)?(scripts/\w+(?:\.py)?)`", README.read_text(encoding="utf-8"))
    assert named
    for path in filter(None, sum(named, ())):
        assert (README.parent / path).exists(), path


def test_the_reader_in_format_md_reads_with_numpy_alone(tmp_path):
    """Whoever has only the specification gets the tensors back."""
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

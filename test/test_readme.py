"""What the README shows works when it is pasted."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_as_it_stands(tmp_path):
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    program = example + "\nassert state['step'] == 7 and (state['model']['weight'] == model.weight).all().item()\n"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)


def test_every_path_it_names_exists():
    named = re.findall(r"\]\(([^)]+)\)|`(?:\./)?(scripts/\w+(?:\.py)?)`", README.read_text(encoding="utf-8"))
    assert named
    for path in filter(None, sum(named, ())):
        assert (README.parent / path).exists(), path

"""Write the examples in docs/cli.md: run each command of the page, and put what it prints below it.

    PYTHONPATH=$PWD "$(scripts/env)" scripts/examples_of_commands.py

A block that begins with ``$ xc`` is a command with its output. The commands run in order in an empty folder, which the
page calls /data, beside a run of three steps on eight virtual devices. A test compares the page with such outputs, in
which all numbers may differ.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from contextlib import chdir
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cli.md"
_BLOCK = re.compile(r"^```\n\$ (xc [^\n]*)\n.*?^```\n", re.DOTALL | re.MULTILINE)
_LOSSES = {100: 3.1, 200: 2.4, 300: 2.6}


def make_run(folder: Path) -> None:
    """Save a run of a small model on a mesh of eight devices."""
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs

    import torch_xla_ckpt as xc

    mesh = xs.Mesh(np.arange(8), (4, 2), ("fsdp", "tensor"))
    torch.manual_seed(0)

    def sharded(*shape: int) -> torch.Tensor:
        tensor = (torch.randn(shape) * 0.02).to("xla")
        xs.mark_sharding(tensor, mesh, ("fsdp", "tensor"))
        return tensor

    with xc.CheckpointManager(folder, 1) as manager:
        for step, loss in _LOSSES.items():
            model: dict[str, torch.Tensor] = {"embed.weight": sharded(256, 64)}
            for n in range(4):
                model[f"layers.{n}.attn.weight"] = sharded(64, 64)
                model[f"layers.{n}.mlp.weight"] = sharded(64, 256)
                model[f"layers.{n}.norm.weight"] = torch.ones(64)
            model["head.weight"] = sharded(256, 64)
            torch_xla.sync()
            state = {"model": model, "step": step, "data": {"position": 8 * step}}
            manager.save(step, state, force=True, metrics={"loss": loss})


def outputs(text: str) -> list[tuple[str, str]]:
    """Return the commands of a page, each with what it prints now."""
    from click.testing import CliRunner

    from torch_xla_ckpt.cli.program import xc

    found = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder).resolve() / "data"
        data.mkdir()
        with chdir(data):
            make_run(data / "run")
            for match in _BLOCK.finditer(text):
                result = CliRunner().invoke(xc, shlex.split(match[1])[1:], prog_name="xc")
                if result.exception is not None and not isinstance(result.exception, SystemExit):
                    raise result.exception
                found.append((match[1], result.output.replace(str(data), "/data")))
    return found


def page(text: str) -> str:
    """Return a page with the outputs of now."""
    answers = iter(outputs(text))

    def block(match: re.Match[str]) -> str:
        command, output = next(answers)
        return f"```\n$ {command}\n{output}```\n"

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("CPU_NUM_DEVICES", "8")
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")

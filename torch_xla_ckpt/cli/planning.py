"""The command that looks ahead: explain."""

from __future__ import annotations

from collections.abc import Sequence

import click

from torch_xla_ckpt import inspecting
from torch_xla_ckpt.cli.drawing import PICTURE, draw
from torch_xla_ckpt.cli.options import Options, command
from torch_xla_ckpt.cli.output import emit


@command("explain")
@click.argument("path")
@click.option("--mesh", required=True, help="Axes with their sizes, from the outermost: fsdp=2,tensor=4.")
@click.option("--spec", "specs", multiple=True, metavar="GLOB=AXES", help="Axes that cut each dimension of these keys.")
@click.option("--processes", default=1, show_default=True, help="Number of processes, which share the devices.")
@click.option(
    "--against",
    metavar="OTHER",
    help="Load into the keys, shapes and dtypes of this checkpoint, model folder or config.json.",
)
@click.option("-o", "--output", metavar="FILE", help=f"Draw saved chunks beside needed boxes into {PICTURE}.")
def explain(
    path: str,
    mesh: str,
    specs: Sequence[str],
    processes: int,
    against: str | None,
    output: str | None,
    storage_options: Options,
    as_json: bool,
) -> None:
    """Say what a job would read, put and need, before it starts.

    In --spec, "-" leaves a dimension whole, and a+b cuts it by two axes. The first GLOB that matches a key counts. Keys
    that none matches are replicated. With --against, also says what would be cast, created or missing. A config.json
    describes a model of transformers, which must be installed.

    \b
    Example:
      xc explain run/latest --mesh fsdp=2,tensor=4 \\
        --spec '*.weight=fsdp,tensor' --processes 8
    """
    found = inspecting.explain(path, mesh, specs, processes=processes, against=against, storage_options=storage_options)
    if output is not None:
        draw(found, output)
    emit("explain", found, str(found), as_json)

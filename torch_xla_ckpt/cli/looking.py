"""Commands that look into one checkpoint or run: ls, show, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click

from torch_xla_ckpt import inspecting
from torch_xla_ckpt.cli.drawing import PICTURE, draw
from torch_xla_ckpt.cli.options import Options, command, parse_keep
from torch_xla_ckpt.cli.output import emit, progress_bar
from torch_xla_ckpt.inspecting import Contents, Sort, TensorView, shown


@command("ls")
@click.argument("path")
@click.argument("patterns", nargs=-1, metavar="[GLOB]...")
@click.option("--all", "every", is_flag=True, help="Give each key a line of its own.")
@click.option("--tree", is_flag=True, help="Show a tree, with sizes added up.")
@click.option("--depth", type=click.IntRange(1), help="Show a tree of this many levels.")
@click.option("--sort", type=click.Choice(get_args(Sort)), help="Order of the keys.  [default: saved]")
@click.option("--keep", multiple=True, metavar="POLICY", help="For a run: show what this policy keeps; see 'xc prune'.")
def ls(
    path: str,
    patterns: Sequence[str],
    every: bool,
    tree: bool,
    depth: int | None,
    sort: Sort | None,
    keep: Sequence[str],
    storage_options: Options,
    as_json: bool,
) -> None:
    """List the keys of a checkpoint, or the steps of a run.

    Keys that differ only in numbers share a line: layers.{0..31}.weight.

    \b
    Example:
      xc ls run/latest 'model.*' --sort bytes
    """
    found = inspecting.inspect(path, *patterns, keep=parse_keep(keep), storage_options=storage_options)
    if not isinstance(found, Contents):
        options = {"--all": every, "--tree": tree, "--depth": depth, "--sort": sort}
        if given := [name for name, value in options.items() if value]:
            raise click.UsageError(
                f"{shown(path)} is a run, and {' and '.join(given)} is for keys of a checkpoint. Name a step, as in "
                f"{shown(path.rstrip('/'))}/latest."
            )
        text = str(found)
    elif tree or depth is not None:
        text = f"{found.head()}\n{found.tree(depth, every=every, sort=sort or 'saved')}"
    else:
        text = f"{found.head()}\n{found.table(every=every, sort=sort or 'saved')}"
    emit("ls", found, text, as_json)


@command("show")
@click.argument("path")
@click.argument("key")
@click.option("--layout", is_flag=True, help="Show which device held which box, and the stored chunks.")
@click.option("--no-statistics", is_flag=True, help="Read only the values that are shown.")
@click.option("-o", "--output", metavar="FILE", help=f"Draw the layout into {PICTURE}, too.")
def show(
    path: str,
    key: str,
    layout: bool,
    no_statistics: bool,
    output: str | None,
    storage_options: Options,
    as_json: bool,
) -> None:
    """Show the values and the statistics of a key, or of a slice of it.

    \b
    Example:
      xc show run/latest 'model.lm_head.weight[0:4, :8]'
    """
    layout = layout or output is not None
    found = inspecting.show(path, key, statistics=not (no_statistics or layout), storage_options=storage_options)
    if layout and not isinstance(found, TensorView):
        raise click.UsageError(f"{shown(key)} is an object, which has no layout.")
    if isinstance(found, TensorView) and output is not None:
        draw(found.layout, output)
    text = str(found.layout) if isinstance(found, TensorView) and layout else str(found)
    emit("show", found, text, as_json)


@command("report")
@click.argument("path")
@click.option(
    "-o", "--output", default="report.html", show_default=True, metavar="FILE", help="The HTML file to write."
)
@click.option("--no-statistics", is_flag=True, help="Read no values.")
def report(path: str, output: str, no_statistics: bool, storage_options: Options, as_json: bool) -> None:
    """Write one HTML page about a checkpoint or a run.

    The page has sizes by module, layouts of the largest tensors, statistics with suspicious values marked (NaN, dead
    rows, exploded norms), and who saved it; of a run, also metrics and sizes over the steps. It is one file and
    needs no network.

    \b
    Example:
      xc report run/latest -o report.html
    """
    with progress_bar("reading") as progress:
        found = inspecting.report(path, values=not no_statistics, storage_options=storage_options, progress=progress)
    Path(output).write_text(inspecting.page(found), encoding="utf-8")
    emit("report", found, f"{found}\nwrote {shown(output)}", as_json)

"""The commands of ``xc``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import click
from click.shell_completion import get_completion_class

from torch_xla_ckpt import inspecting
from torch_xla_ckpt.cli.options import command, parse_keep
from torch_xla_ckpt.cli.output import emit, progress_bar
from torch_xla_ckpt.inspecting import Contents, Sort, TensorView

Options = Mapping[str, Any] | None


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(package_name="torch_xla_ckpt", message="%(prog)s of torch_xla_ckpt %(version)s")
def xc() -> None:
    """Look into checkpoints, from any machine, without devices.

    PATH is a checkpoint of torch_xla_ckpt, of stock torch.distributed.checkpoint, of torch_xla or of Lightning; or the
    folder of a run, of which RUN/latest, RUN/best, RUN/best:METRIC:max and RUN/100 name one step. It is a local path or
    any fsspec URL, such as s3://bucket/run.

    No command runs code from a file. The exit status is 0, or 1 if something differs or is damaged, or 2 if the
    question cannot be answered.
    """


@command(xc, "ls")
@click.argument("path")
@click.argument("patterns", nargs=-1, metavar="[GLOB]...")
@click.option("--all", "every", is_flag=True, help="Give each key a line of its own.")
@click.option("--tree", is_flag=True, help="Show a tree, with sizes added up.")
@click.option("--depth", type=click.IntRange(1), help="Levels of the tree to show.")
@click.option(
    "--sort", type=click.Choice(get_args(Sort)), default="saved", help="Order of the keys.", show_default=True
)
@click.option("--keep", multiple=True, metavar="POLICY", help="For a run: show what this policy keeps; see 'xc prune'.")
def ls(
    path: str,
    patterns: Sequence[str],
    every: bool,
    tree: bool,
    depth: int | None,
    sort: Sort,
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
        text = str(found)
    elif tree:
        text = f"{found.head()}\n{found.tree(depth)}"
    else:
        text = f"{found.head()}\n{found.table(every=every, sort=sort)}"
    emit("ls", found, text, as_json)


@command(xc, "show")
@click.argument("path")
@click.argument("key")
@click.option("--layout", is_flag=True, help="Show which device held which box, and the stored chunks.")
@click.option("--no-statistics", is_flag=True, help="Read only the values that are shown.")
@click.option("-o", "--output", metavar="FILE", help="With --layout: also draw the layout into a PNG, SVG or PDF file.")
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
    if output is not None and not layout:
        raise click.UsageError("-o draws the layout: add --layout.")
    found = inspecting.show(path, key, statistics=not (no_statistics or layout), storage_options=storage_options)
    if layout and not isinstance(found, TensorView):
        raise click.UsageError(f"{inspecting.shown(key)} is an object, which has no layout.")
    if output is not None and isinstance(found, TensorView):
        from torch_xla_ckpt.cli.pictures import draw_layout  # matplotlib is optional

        draw_layout(found.layout, output)
    text = str(found.layout) if layout and isinstance(found, TensorView) else str(found)
    emit("show", found, text, as_json)


@command(xc, "verify")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
def verify(paths: Sequence[str], storage_options: Options, as_json: bool) -> bool:
    """Read everything, and name each damaged key, file and byte range.

    Also names files in the folder that do not belong to the checkpoint. Of a run, all steps are checked. The exit
    status is 1 if anything is damaged.

    \b
    Example:
      xc verify run s3://bucket/run/100
    """
    with progress_bar("verifying") as progress:
        found = inspecting.check(*paths, storage_options=storage_options, progress=progress)
    emit("verify", found, str(found), as_json)
    return found.ok


@command(xc, "diff")
@click.argument("a")
@click.argument("b")
@click.argument("patterns", nargs=-1, metavar="[GLOB]...")
def diff(a: str, b: str, patterns: Sequence[str], storage_options: Options, as_json: bool) -> bool:
    """Compare two checkpoints bit by bit.

    Their shardings may differ. Chunks that both have are compared by their checksums, without reading them. The exit
    status is 1 if the checkpoints differ.

    \b
    Example:
      xc diff run/100 run/200 'model.*'
    """
    with progress_bar("comparing") as progress:
        found = inspecting.diff(a, b, *patterns, storage_options=storage_options, progress=progress)
    emit("diff", found, str(found), as_json)
    return found.same


@xc.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes commands and options in a shell.

    \b
    Example:
      eval "$(xc completion bash)"
    """
    cls = get_completion_class(shell)
    assert cls is not None
    click.echo(cls(xc, {}, "xc", "_XC_COMPLETE").source())

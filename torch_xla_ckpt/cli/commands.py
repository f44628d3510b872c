"""The commands of ``xc``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import click
import torch
from click.shell_completion import get_completion_class

import torch_xla_ckpt
from torch_xla_ckpt import inspecting
from torch_xla_ckpt.cli.options import command, parse_keep
from torch_xla_ckpt.cli.output import emit, progress_bar
from torch_xla_ckpt.errors import CheckpointError
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
        _pictures().draw_layout(found.layout, output)
    text = str(found.layout) if layout and isinstance(found, TensorView) else str(found)
    emit("show", found, text, as_json)


def _pictures() -> ModuleType:
    """Return the module that draws. Importing matplotlib takes a second, and few commands draw."""
    try:
        from torch_xla_ckpt.cli import pictures
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"drawing needs {error.name}. Install it with: pip install 'torch_xla_ckpt[cli]'. Or leave out -o"
        ) from error
    return pictures


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


@command(xc, "explain")
@click.argument("path")
@click.option("--mesh", required=True, help="Axes with their sizes, from the outermost: fsdp=2,tensor=4.")
@click.option("--spec", "specs", multiple=True, metavar="GLOB=AXES", help="Axes that cut each dimension of these keys.")
@click.option("--processes", default=1, show_default=True, help="Number of processes, which share the devices.")
@click.option("--against", metavar="OTHER", help="Load into the keys, shapes and dtypes of this checkpoint or model.")
@click.option(
    "-o", "--output", metavar="FILE", help="Draw saved chunks beside needed boxes into a PNG, SVG or PDF file."
)
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
    that none matches are replicated.

    \b
    Example:
      xc explain run/latest --mesh fsdp=2,tensor=4 \\
        --spec '*.weight=fsdp,tensor' --processes 8
    """
    found = inspecting.explain(path, mesh, specs, processes=processes, against=against, storage_options=storage_options)
    if output is not None:
        _pictures().draw_plan(found, output)
    emit("explain", found, str(found), as_json)


@command(xc, "convert")
@click.argument("source")
@click.argument("target")
@click.option("--to", "form", type=click.Choice(["dcp", "safetensors", "torch"]), default="dcp", show_default=True)
@click.option("--mesh", help="Axes whose shards become chunks: fsdp=2,tensor=4. Without it, tensors stay whole.")
@click.option("--spec", "specs", multiple=True, metavar="GLOB=AXES", help="Axes that cut each dimension of these keys.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at TARGET, which may be SOURCE.")
@click.option("--dry-run", is_flag=True, help="Write nothing.")
def convert(
    source: str,
    target: str,
    form: str,
    mesh: str | None,
    specs: Sequence[str],
    overwrite: bool,
    dry_run: bool,
    storage_options: Options,
    as_json: bool,
) -> None:
    """Rewrite a checkpoint with other chunks, or in another format.

    Keys, step and metadata stay. The new checkpoint appears in one step, and all of it is read back. With --to
    safetensors or torch, this is 'xc export'.

    \b
    Example:
      xc convert run/100 small-files --mesh fsdp=4 --spec '*.weight=fsdp'
    """
    if form != "dcp":
        if mesh or specs or overwrite:
            raise click.UsageError("--mesh, --spec and --overwrite belong to --to dcp.")
        _export(source, target, form, None, None, dry_run, storage_options, as_json)
        return
    if specs and not mesh:
        raise click.UsageError("--spec needs --mesh.")
    found = inspecting.convert(
        source,
        target,
        mesh=mesh,
        specs=specs,
        overwrite=overwrite,
        dry_run=dry_run,
        storage_options=storage_options,
    )
    emit("convert", found, str(found), as_json)


@command(xc, "export")
@click.argument("source")
@click.argument("target")
@click.option("--to", "form", type=click.Choice(["safetensors", "torch"]), default="safetensors", show_default=True)
@click.option("--key", help="Key of the model in SOURCE. Without it, the only model is found.")
@click.option("--dtype", help="Cast floating-point tensors, to bfloat16 for example.")
@click.option("--dry-run", is_flag=True, help="Write nothing, and list what SOURCE has.")
def export(
    source: str,
    target: str,
    form: str,
    key: str | None,
    dtype: str | None,
    dry_run: bool,
    storage_options: Options,
    as_json: bool,
) -> None:
    """Write a model as a Hugging Face folder of safetensors, or as one torch.save file.

    \b
    Example:
      xc export run/latest hf-model --key model --dtype bfloat16
    """
    _export(source, target, form, key, dtype, dry_run, storage_options, as_json)


def _export(
    source: str,
    target: str,
    form: str,
    key: str | None,
    dtype: str | None,
    dry_run: bool,
    storage_options: Options,
    as_json: bool,
) -> None:
    if storage_options:
        raise click.UsageError(
            "export takes no --storage-option yet. Configure the store by its own variables or files."
        )
    cast = getattr(torch, dtype, None) if dtype else None
    if dtype and not isinstance(cast, torch.dtype):
        raise click.UsageError(f"torch has no dtype {dtype}. Write bfloat16, float16 or float32, for example.")
    if dry_run:
        contents = inspecting.inspect(source, *([f"{key}.*"] if key else []))
        emit("export", contents, str(contents), as_json)
        return
    path = inspecting.path_of_checkpoint(source)
    found = torch_xla_ckpt.export(path, target, key=key, format=form, dtype=cast)  # type: ignore[arg-type]
    emit("export", found, str(found), as_json)


@command(xc, "prune")
@click.argument("run")
@click.option(
    "--keep",
    multiple=True,
    required=True,
    metavar="POLICY",
    help="latest:3, best:1:loss, best:1:accuracy:max, every:1000, every:2h, newer:3d. Repeat it for several.",
)
@click.option("--yes", is_flag=True, help="Delete. Without it, nothing is changed.")
@click.option("--dry-run", is_flag=True, help="Delete nothing, which is the default.")
def prune(run: str, keep: Sequence[str], yes: bool, dry_run: bool, storage_options: Options, as_json: bool) -> None:
    """Show which steps of a run policies would delete, and why. Delete them with --yes.

    Deletes as a CheckpointManager would: only steps that a manager wrote, and none before a newer one was read back.
    Each deletion is noted in the run's journal. Do not prune a run while its training program saves to an object store.

    \b
    Example:
      xc prune run --keep latest:3 --keep best:1:loss --yes
    """
    if yes and dry_run:
        raise click.UsageError("--yes and --dry-run contradict each other.")
    policy = parse_keep(keep)
    assert policy is not None
    found = inspecting.prune(run, policy, delete=yes, storage_options=storage_options)
    emit("prune", found, str(found), as_json)
    inspecting.require_deleted(found)


@command(xc, "report")
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
    emit("report", found, f"{found}\nwrote {inspecting.shown(output)}", as_json)


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

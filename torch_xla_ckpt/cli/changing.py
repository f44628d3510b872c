"""Commands that write or delete: convert, export, prune. Each has a dry run."""

from __future__ import annotations

from collections.abc import Sequence

import click
import torch

import torch_xla_ckpt
from torch_xla_ckpt import inspecting
from torch_xla_ckpt.cli.options import Options, command, parse_keep
from torch_xla_ckpt.cli.output import emit

_FORMATS = click.Choice(["dcp", "safetensors", "torch"])


@command("convert")
@click.argument("source")
@click.argument("target")
@click.option("--to", "form", type=_FORMATS, default="dcp", show_default=True)
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

    Keys, step, time and metadata stay. The new checkpoint appears in one step, and all of it is read back. With
    --overwrite, RUN/latest and RUN/best replace that step. With --to safetensors or torch, this is 'xc export'.

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
    _convert(source, target, mesh, specs, overwrite, dry_run, storage_options, as_json)


@command("export")
@click.argument("source")
@click.argument("target")
@click.option("--to", "form", type=_FORMATS, default="safetensors", show_default=True)
@click.option("--key", help="Key of the model in SOURCE. Without it, the only model is found.")
@click.option("--dtype", help="Cast floating-point tensors, to bfloat16 for example.")
@click.option("--dry-run", is_flag=True, help="Write nothing.")
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

    With --to dcp, this is 'xc convert', which writes everything.

    \b
    Example:
      xc export run/latest hf-model --key model --dtype bfloat16
    """
    if form == "dcp":
        if key is not None or dtype is not None:
            raise click.UsageError("--key and --dtype belong to --to safetensors and --to torch.")
        _convert(source, target, None, (), False, dry_run, storage_options, as_json)
        return
    _export(source, target, form, key, dtype, dry_run, storage_options, as_json)


def _convert(
    source: str,
    target: str,
    mesh: str | None,
    specs: Sequence[str],
    overwrite: bool,
    dry_run: bool,
    storage_options: Options,
    as_json: bool,
) -> None:
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
    cast = getattr(torch, dtype, None) if dtype else None
    if dtype and not isinstance(cast, torch.dtype):
        raise click.UsageError(f"torch has no dtype {dtype}. Write bfloat16, float16 or float32, for example.")
    inspecting.require_new_name(target, storage_options)
    found = torch_xla_ckpt.export(
        inspecting.path_of_checkpoint(source, storage_options),
        target,
        key=key,
        format=form,  # type: ignore[arg-type]
        dtype=cast,
        dry_run=dry_run,
        storage_options=storage_options,
    )
    emit("export", found, str(found), as_json)


@command("prune")
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

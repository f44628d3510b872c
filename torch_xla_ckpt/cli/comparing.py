"""Commands that answer yes or no, with the exit status: verify and diff."""

from __future__ import annotations

from collections.abc import Sequence

import click

from torch_xla_ckpt import inspecting
from torch_xla_ckpt.cli.options import Options, command
from torch_xla_ckpt.cli.output import emit, progress_bar


@command("verify")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
def verify(paths: Sequence[str], storage_options: Options, as_json: bool) -> bool:
    """Read everything, and name each damaged key, file and byte range.

    Also names files in the folder that do not belong to the checkpoint. Of a run, all steps are checked. The exit
    status is 1 if anything is damaged, and 2 if there is nothing to check at a PATH; the other PATHs are checked first.

    \b
    Example:
      xc verify run s3://bucket/run/100
    """
    with progress_bar("verifying") as progress:
        found = inspecting.check(*paths, storage_options=storage_options, progress=progress)
    emit("verify", found, str(found), as_json)
    inspecting.require_checked(found)
    return found.ok


@command("diff")
@click.argument("a")
@click.argument("b")
@click.argument("patterns", nargs=-1, metavar="[GLOB]...")
@click.option("--all", "every", is_flag=True, help="Give each key a line of its own, equal keys too.")
def diff(a: str, b: str, patterns: Sequence[str], every: bool, storage_options: Options, as_json: bool) -> bool:
    """Compare two checkpoints bit by bit.

    Their shardings may differ. Chunks that both have are compared by their checksums, without reading them. The exit
    status is 1 if the checkpoints differ.

    \b
    Example:
      xc diff run/100 run/200 'model.*'
    """
    with progress_bar("comparing") as progress:
        found = inspecting.diff(a, b, *patterns, storage_options=storage_options, progress=progress)
    emit("diff", found, found.text(every=every), as_json)
    return found.same

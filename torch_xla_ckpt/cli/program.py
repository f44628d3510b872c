"""The program ``xc``: its commands, and shell completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from torch_xla_ckpt.cli.changing import convert, export, prune
from torch_xla_ckpt.cli.comparing import diff, verify
from torch_xla_ckpt.cli.failures import OneLineGroup
from torch_xla_ckpt.cli.looking import ls, report, show
from torch_xla_ckpt.cli.planning import explain


@click.command("completion")
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


@click.group(
    cls=OneLineGroup,
    commands=[ls, show, verify, diff, explain, convert, export, prune, report, completion],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(package_name="torch_xla_ckpt", message="%(prog)s of torch_xla_ckpt %(version)s")
def xc() -> None:
    """Look into checkpoints, from any machine, without devices.

    PATH is a checkpoint of torch_xla_ckpt, of stock torch.distributed.checkpoint, of torch_xla or of Lightning; a
    safetensors or torch.save file or folder; or the folder of a run, of which RUN/latest, RUN/best, RUN/best:METRIC:max
    and RUN/100 name one step. It is a local path or any fsspec URL, such as s3://bucket/run.

    No command runs code from a file. The exit status is 0, or 1 if something differs or is damaged, or 2 if the
    question cannot be answered.
    """

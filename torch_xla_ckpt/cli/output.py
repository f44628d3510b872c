"""Results on standard output: as text, in colours on a terminal, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

from torch_xla_ckpt.storage import OnProgress

VERSION = 1
"""Version of the JSON. It changes if a field is renamed, removed, or changes its meaning."""
ANSWERS = ("ok", "same")
"""Properties of results that JSON has beside their fields."""
_COLOURED = 2000  # lines up to which text is coloured; colouring more of them takes seconds
_BAD = re.compile(
    r"\b(?:DAMAGED|NOT CHECKED|NOT DELETED|damaged|differs|would be deleted|only in [ab]|other (?:shape|dtype|type)|"
    r"NaN|Inf)\b"
)
_GOOD = re.compile(r"^whole\b|\bok$", re.MULTILINE)


def emit(command: str, result: Any, text: str, as_json: bool) -> None:
    """Print a result.

    Args:
        command: the name of the command.
        result: a frozen dataclass.
        text: the result as text.
        as_json: whether to print JSON instead of the text.
    """
    if as_json:
        click.echo(json.dumps({"command": command, "version": VERSION, **plain(result)}, indent=1, allow_nan=False))
    elif sys.stdout.isatty() and text.count("\n") <= _COLOURED:
        styled = Text(text)
        styled.highlight_regex(_BAD, "red")
        styled.highlight_regex(_GOOD, "green")
        Console(highlight=False).print(styled, soft_wrap=True)
    else:
        click.echo(text)


def plain(value: Any) -> Any:
    """Return a value as JSON has it. NaN and infinities become text, because JSON lacks them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        answers = {name: getattr(value, name) for name in ANSWERS if hasattr(type(value), name)}
        return {**answers, **fields}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return (
            value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, complex):
        return [plain(value.real), plain(value.imag)]
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


@contextmanager
def progress_bar(what: str) -> Iterator[OnProgress | None]:
    """Show a progress bar on standard error within the block; None if standard error is no terminal.

    Args:
        what: the words before the bar.

    Yields:
        A function that is called with the bytes just done and the bytes of the whole operation.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=0)
        lock = threading.Lock()
        done = 0

        def advance(nbytes: int, total: int) -> None:
            nonlocal done
            with lock:
                done += nbytes
                if done > total:  # the next checkpoint has begun
                    done = nbytes
                bar.update(task, completed=done, total=total)

        yield advance

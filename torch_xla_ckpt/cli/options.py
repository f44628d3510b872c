"""Options that several commands share, and their values in Python."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

import click

from torch_xla_ckpt import keep
from torch_xla_ckpt.cli.failures import failing_in_one_line

_VALUE = re.compile(r'true|false|null|-?\d{1,15}|[{\["].*', re.DOTALL)
_COUNT = re.compile(r"[0-9]{1,15}")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([hd])")


Options = Mapping[str, Any] | None
"""Options of the fsspec filesystem behind a URL."""


def command(name: str) -> Callable[[Callable[..., bool | None]], click.Command]:
    """Make a command of a function, with the shared options ``--storage-option``, ``--json`` and ``--debug``."""

    def made(function: Callable[..., bool | None]) -> click.Command:
        run: Callable[..., None] = failing_in_one_line(function)
        for option in _SHARED:
            run = option(run)
        return click.command(name)(run)

    return made


def _storage_options(context: click.Context, parameter: click.Parameter, pairs: Sequence[str]) -> dict[str, Any] | None:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r} is not key=value, such as endpoint_url=http://localhost:9000")
        try:
            options[name] = json.loads(value) if _VALUE.fullmatch(value) else value
        except ValueError as error:
            raise click.BadParameter(f"the value of {name!r} begins as JSON and is none ({error})") from error
    return options or None


_SHARED = (
    click.option("--debug", is_flag=True, help="Show tracebacks and all warnings."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/cli.md describes the fields."),
    click.option(
        "--storage-option",
        "storage_options",
        metavar="KEY=VALUE",
        multiple=True,
        callback=_storage_options,
        help="Option of the fsspec backend behind a URL. Repeat it for several.",
    ),
)


def parse_keep(specs: Sequence[str]) -> keep.Keep | None:
    """Return the retention policy that ``--keep`` options describe; None if there are none.

    Raises:
        click.BadParameter: a description cannot be understood.
    """
    policies = [_policy(spec) for spec in specs]
    return keep.AnyOf(tuple(policies)) if policies else None


def _policy(spec: str) -> keep.Keep:
    kind, *rest = spec.split(":")
    try:
        if kind == "all" and not rest:
            return keep.All()
        if kind == "latest" and len(rest) == 1:
            return keep.Latest(_number(rest[0]))
        if kind == "best" and len(rest) in (2, 3):
            mode: Literal["min", "max"] = "min" if len(rest) == 2 else rest[2]  # type: ignore[assignment]
            return keep.Best(_number(rest[0]), rest[1], mode)
        if kind == "every" and len(rest) == 1:
            match = _DURATION.fullmatch(rest[0])
            return keep.Every(hours=_hours(*match.groups())) if match else keep.Every(steps=_number(rest[0]))
        if kind == "newer" and len(rest) == 1 and (match := _DURATION.fullmatch(rest[0])):
            return keep.Newer(timedelta(hours=_hours(*match.groups())))
    except ValueError as error:
        raise click.BadParameter(f"--keep {spec}: {error}") from error
    raise click.BadParameter(
        f"--keep {spec} is no policy. Write latest:3, best:1:loss, best:1:accuracy:max, every:1000, every:2h, newer:3d "
        "or all"
    )


def _number(text: str) -> int:
    """Return a number of a policy.

    Raises:
        ValueError: the text is no number of 1 to 15 digits.
    """
    if not _COUNT.fullmatch(text):
        raise ValueError(f"{text!r} is no number" + (" of at most 15 digits" if text.isdecimal() else ""))
    return int(text)


def _hours(number: str, unit: str) -> float:
    """Return the hours of a duration.

    Raises:
        ValueError: the duration began before the year 1.
    """
    hours = float(number) * (24 if unit == "d" else 1)
    try:
        datetime.now(timezone.utc) - timedelta(hours=hours)
    except OverflowError:
        raise ValueError(f"{number}{unit} ago is before the first year of the calendar") from None
    return hours

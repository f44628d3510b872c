"""Errors of commands: one line on standard error, and an exit status."""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec

import click

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.inspecting import shown

DIFFERS = 1
"""Exit status: the answer is that something differs or is damaged."""
CANNOT_ANSWER = 2
"""Exit status: the question could not be answered."""
_BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended
_INTERRUPTED = 130

_P = ParamSpec("_P")


def failing_in_one_line(command: Callable[_P, bool | None]) -> Callable[_P, None]:
    """Make a command exit with its status: 1 if it returns False, 2 with one line of text if it raises; a decorator.

    With ``debug=True`` among its arguments, the traceback is printed as well.
    """

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        debug = bool(kwargs.pop("debug", False))
        try:
            with nullcontext() if debug else _quiet():
                answer = command(*args, **kwargs)
            sys.stdout.flush()
        except (click.exceptions.Exit, click.ClickException):
            raise
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
            raise SystemExit(_BROKEN_PIPE) from None
        except KeyboardInterrupt:
            raise SystemExit(_INTERRUPTED) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            click.echo(f"xc: {_line(error, debug)}", err=True)
            raise SystemExit(CANNOT_ANSWER) from None
        raise SystemExit(DIFFERS if answer is False else 0)

    return run


class OneLineGroup(click.Group):
    """A group of commands that prints errors of usage in one line, too."""

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        run = functools.partial(super().main, args, prog_name, complete_var, False, **extra)
        if not standalone_mode:
            return run()
        try:
            status: Any = run()
        except click.exceptions.NoArgsIsHelpError as error:  # no command was given
            error.show()
            raise SystemExit(CANNOT_ANSWER) from None
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            more = "" if context is None else f". '{context.command_path} --help' lists the options"
            click.echo(f"xc: {shown(error.format_message()).rstrip('.')}{more}", err=True)
            raise SystemExit(CANNOT_ANSWER) from None
        except click.Abort:
            raise SystemExit(_INTERRUPTED) from None
        raise SystemExit(status if isinstance(status, int) else 0)


def open_closed_streams() -> None:
    """Discard what is printed to a stream that the caller has closed, as with ``>&-`` in a shell."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, it is open to the end


def print_any_character() -> None:
    """Print characters that the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block, print each warning of this package once, as a single line, and no others."""
    logger = logging.getLogger("torch_xla_ckpt")
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    printed: set[str] = set()  # a command may open a file several times

    def is_new(record: logging.LogRecord) -> bool:
        text, before = record.getMessage(), len(printed)
        printed.add(text)
        return len(printed) > before

    handler.addFilter(is_new)
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"xc: {record.levelname.lower()}: {shown(record.getMessage())}"


def _line(error: Exception, debug: bool) -> str:
    if isinstance(error, CheckpointError):
        return shown(error)
    kind = type(error).__name__
    if isinstance(error, OSError):
        return f"{shown(error)}. Check the path, the access rights and the storage ({kind})"
    if isinstance(error, (ValueError, ImportError)):
        return shown(error)
    more = "" if debug else ". Run the command again with --debug, and report the traceback"
    return f"unexpected {kind}: {shown(error)}{more}"

"""The command line ``xc``: it parses, calls what Python users call, and prints.

``commands`` has the commands. ``options`` are the options that they share, ``output`` prints results as text or JSON,
``failures`` turns errors into one line and an exit status, ``pictures`` draws. Only this room imports click, rich and
matplotlib, which the extra ``[cli]`` brings.
"""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line, and end the process with its exit status."""
    try:
        from torch_xla_ckpt.cli.failures import open_closed_streams, print_any_character
        from torch_xla_ckpt.cli.program import xc
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("click", "rich"):
            raise
        print(
            f"xc: the command line needs {package}. Install it with: pip install 'torch_xla_ckpt[cli]'. In Python, "
            "torch_xla_ckpt.inspect, diff, explain and verify work without it",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    open_closed_streams()
    print_any_character()
    collects = gc.isenabled()
    gc.disable()  # a command makes many objects, keeps them to its end, and ends soon
    try:
        xc(prog_name="xc")
    finally:
        if collects:  # the process goes on if a program caught SystemExit
            gc.enable()


__all__ = ["main"]

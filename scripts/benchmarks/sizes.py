"""Sizes on the command line."""

import argparse

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size_of(text: str) -> int:
    """Return the bytes of a size: "64MiB" is 67,108,864."""
    number, unit = text[:-3], text[-3:]
    if unit not in UNITS or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size. Write it as 64MiB or 1GiB")
    return int(number) * UNITS[unit]

"""Numbers of bytes for people."""


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes with three digits and a binary unit: "1.5 GiB", for example."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 999.5:  # three digits, or the format would resort to exponents
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"

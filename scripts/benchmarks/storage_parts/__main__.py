"""The time and memory of saving and loading, beside torch_xla's planners on stock storage, bare copies and Orbax.

Every time is the median of several runs after a warm-up. The sides take turns, and every result is compared bit for
bit. The page cache is warm, and no side calls fsync. Ours writes and verifies checksums. The exit status is 0 if all
results are right, whether or not the targets are reached.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch_xla
from rich.console import Console
from rich.table import Table

from benchmarks.sizes import UNITS, size_of
from benchmarks.storage_parts.cases import CASES, Bench, Claim, Row
from benchmarks.storage_parts.pictures import draw
from benchmarks.storage_parts.sides import OURS, Orbax
from benchmarks.storage_parts.state import TENSORS, Data

console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, show_lines=True)
    table.add_column("case")
    for name in ("stock", "ours"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ours is or has")
    for name in ("target", "reached"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        cells = [[f"{claim.measured:.2f} {claim.what}", *target_of(claim)] for claim in row.claims]
        peer, ours = (quantity(row.measured[name], row.unit) for name in (row.peer, OURS.name))
        table.add_row(row.case, peer, ours, *("\n".join(column) for column in zip(*cells)))
    return table


def target_of(claim: Claim) -> tuple[str, str]:
    """Return a claim's target, and whether it was reached, in words."""
    if claim.reached is None:
        return "", ""
    target = f"at least {claim.least:g}" if claim.least is not None else f"at most {claim.most:g}"
    return target, "[green]yes[/]" if claim.reached else "[bold red]no[/]"


def others(rows: Sequence[Row]) -> Table:
    """Return a table of the further measurements, which have no target."""
    table = Table(title="Beside them", box=None, pad_edge=False)
    table.add_column("case")
    table.add_column("measured")
    for row in rows:
        rest = {name: values for name, values in row.measured.items() if name not in (row.peer, OURS.name)}
        if rest:
            words = (f"{name} {quantity(values, row.unit)}" for name, values in rest.items())
            table.add_row(row.case, ", ".join(words))
    return table


def quantity(values: Sequence[float], unit: str) -> str:
    median = statistics.median(values)
    return f"{median:.3f} s" if unit == "seconds" else f"{median / UNITS['MiB']:,.0f} MiB"


def facts(options: argparse.Namespace, orbax: Orbax | None) -> dict[str, Any]:
    """Return the size of the benchmark, and the machine and software it runs on."""
    software = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    software.append(f"torch_xla {torch_xla.__version__}")
    return {
        "bytes": options.size,
        "tensors": TENSORS,
        "repeat": options.repeat,
        "processors": os.cpu_count(),
        "software": [*software, orbax.version] if orbax else software,
    }


def as_json(row: Row) -> dict[str, Any]:
    return {
        **asdict(row),
        "claims": [{**asdict(claim), "reached": claim.reached} for claim in row.claims],
        "medians": {name: statistics.median(values) for name, values in row.measured.items()},
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--size",
        type=size_of,
        default="1GiB",
        help="size of the state, a power of two (1GiB). Needs ten times as much memory",
    )
    parser.add_argument("--small", type=int, default=20_000, help="number of small tensors (20000)")
    parser.add_argument("--repeat", type=int, default=5, help="number of runs that are counted (5)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--orbax", action="store_true", help="also compare with Orbax, which is installed once")
    parser.add_argument("--folder", help="folder on the disk to measure (the system's temporary folder)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--chart", type=Path, help="also draw the chart into this PNG")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    data = Data(options.size)
    size = f"{options.size / UNITS['GiB']:g} GiB" if options.size >= UNITS["GiB"] else f"{options.size >> 20} MiB"
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        closing(Orbax(TENSORS, data.shape)) if options.orbax else nullcontext() as orbax,
    ):
        bench = Bench(data, Path(folder), options.repeat, orbax)
        for case in options.only:
            with console.status(f"{case} ({len(rows)} rows measured)"):
                rows += bench.run(case, options.small)
            if options.json:  # after every case: a run takes many minutes
                report = {**facts(options, orbax), "rows": [as_json(row) for row in rows]}
                options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(table_of(rows, f"{size} of float32 in {TENSORS} tensors, medians of {options.repeat}"))
    console.print(others(rows))
    if options.chart:
        draw(rows, size, options.chart)


if __name__ == "__main__":
    main()

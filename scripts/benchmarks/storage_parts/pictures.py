"""The chart of ``scripts/benchmarks/storage``: times relative to stock storage."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.storage_parts.cases import Row
from benchmarks.storage_parts.sides import DCP, OURS, Orbax

WIDTH, DPI = 7.2, 120  # inches, and pixels an inch: 864 pixels
BAR = 0.8 / 3
PEER_COLOUR, COLOURS = "#c4c4c4", {OURS.name: "#1b6ca8", Orbax.name: "#e3a857"}


def draw(rows: Sequence[Row], size: str, path: Path) -> None:
    """Draw a group of bars for each case: the peer, ours, and Orbax if it took part.

    Args:
        rows: the measured rows; rows in bytes are left out.
        size: the size of the state in words, for the title.
        path: the PNG file to write.
    """
    rows = [row for row in rows if row.unit == "seconds"]
    figure = Figure(figsize=(WIDTH, 1.4 + 0.65 * len(rows)), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        draw_case(axes, place, row)
    axes.set_yticks(range(len(rows)), [label(row) for row in rows])
    axes.set_xlim(0, axes.get_xlim()[1] * 1.12)  # room for the label of the longest bar
    axes.invert_yaxis()
    axes.set_xlabel("time, stock storage = 1 (shorter is faster)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"Saving and loading {size} over eight devices", fontsize=12)
    for name, colour in (("torch_xla's planners, stock storage", PEER_COLOUR), *COLOURS.items()):
        if name not in COLOURS or any(name in row.measured for row in rows):
            axes.bar(0, 0, color=colour, label={OURS.name: "ours, with checksums"}.get(name, name))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def draw_case(axes: Axes, place: float, row: Row) -> None:
    medians = {name: statistics.median(times) for name, times in row.measured.items()}
    peer = medians[row.peer]
    shown = [name for name in (row.peer, *COLOURS) if name in medians]
    for number, name in enumerate(shown):
        y = place + (number - (len(shown) - 1) / 2) * BAR
        axes.barh(y, medians[name] / peer, BAR * 0.94, color=COLOURS.get(name, PEER_COLOUR))
        words = f" {medians[name]:.2f} s"
        if name == OURS.name:
            words = f" {peer / medians[name]:.1f} times as fast"
        weight = "bold" if name == OURS.name else "normal"
        axes.text(medians[name] / peer, y, words, va="center", fontsize=8, fontweight=weight)


def label(row: Row) -> str:
    return row.case if row.peer != DCP.name else f"{row.case}\n(DCP's planners)"

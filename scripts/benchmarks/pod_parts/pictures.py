"""The picture of ``scripts/benchmarks/pod``: how planning grows with the pod."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

WIDTH, DPI = 7.2, 120  # inches, and pixels an inch: 864 pixels
LINES = {  # what is measured, in words, and the colour of its line
    "first": ("coordinator, first save", "#1b6ca8"),
    "second": ("coordinator, second save", "#5fb0d9"),
    "load": ("a host's load plan, metadata included", "#e3a857"),
}
BEFORE = 1024, 14.6  # chips, and seconds of plan and metadata before plans were arrays, from an idle machine


def draw(pods: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw processor time and memory over the number of chips.

    Args:
        pods: the figures of each pod, as ``measure`` returns them.
        path: the PNG file to write.
    """
    chips = [pod["chips"] for pod in pods]
    figure = Figure(figsize=(WIDTH, 4.4), dpi=DPI, layout="constrained")
    times, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, (words, colour) in LINES.items():
        times.plot(chips, [pod[name]["processor"] for pod in pods], "o-", color=colour, label=words, markersize=4)
    times.plot(*BEFORE, "x", color="#8a8a8a", label="both saves before, without gathering")
    times.set_title("processor time", fontsize=11)
    memory.plot(chips, [pod["memory"] / 1024 for pod in pods], "o-", color="#1b6ca8", markersize=4)
    memory.plot(BEFORE[0], 2.4, "x", color="#8a8a8a")
    memory.set_title("memory of the coordinator", fontsize=11)
    for axes, unit in ((times, "s"), (memory, "GiB")):
        _dress(axes, chips, unit)
    figure.suptitle("Planning for 1,000 tensors that are cut over all chips of a simulated pod", fontsize=12)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path)


def _dress(axes: Axes, chips: Sequence[int], unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(chips, [f"{number:,}" for number in chips], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} {unit}"))
    axes.set_xlabel("chips")
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)

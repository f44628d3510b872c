"""The picture of one save's timeline, with one lane a thread."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

import torch_xla_ckpt as xc

WIDTH, DPI = 7.2, 120  # inches, and pixels an inch: 864 pixels
COLOURS = {
    "training step": "#d9d9d9",
    "async_save": "#c0392b",
    "fetch": "#e3a857",
    "write": "#1b6ca8",
    "commit": "#5b2c6f",
    "wait for the writers": "#f3e3c7",
    "wait for the devices": "#efefef",
}
LANES = {"MainThread": "training loop", "SPMDStager": "fetch", "ShardWriter-0": "writer 1", "ShardWriter-1": "writer 2"}


def draw(timeline: xc.Timeline, path: Path) -> None:
    """Draw every span that has a colour, and write the duration beside the call that blocks the loop."""
    spans = [span for span in timeline.spans if span.what in COLOURS]
    begin = min(span.start for span in spans)
    lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    figure = Figure(figsize=(WIDTH, 1.6 + 0.5 * len(lanes)), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for span in spans:
        if span.lane in lanes:
            place = lanes.index(span.lane)
            left, width = (span.start - begin) * 1e3, (span.stop - span.start) * 1e3
            edge = "white" if span.what == "training step" else "none"
            axes.barh(place, width, 0.62, left, color=COLOURS[span.what], edgecolor=edge)
            if span.what == "async_save":
                axes.annotate(
                    f"async_save: {width:.0f} ms",
                    *((left + width / 2, place - 0.32), (left + width / 2, place - 0.75)),
                    ha="center",
                    color=COLOURS[span.what],
                    fontsize=9,
                    arrowprops={"arrowstyle": "-", "color": COLOURS[span.what]},
                )
    axes.set_yticks(range(len(lanes)), [LANES[lane] for lane in lanes])
    axes.set_ylim(len(lanes) - 0.5, -1.0)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title("One save while training goes on", fontsize=12)
    shown = [what for what in COLOURS if any(span.what == what for span in spans)]
    handles = [Patch(color=COLOURS[what], label=what) for what in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path)

"""The demo's pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

COLOURS = matplotlib.color_sequences["Set2"]
CHUNKS: dict[str, Any] = {"color": "darkred", "linestyle": "--", "linewidth": 1.4}
# One tensor that is tiled in both dimensions, and one that leaves an axis of the mesh to replicas.
DRAWN = ("model.model.layers.0.mlp.down_proj.weight", "model.model.embed_tokens.weight")


@dataclass(frozen=True)
class Region:
    """A rectangle of a matrix.

    Args:
        top, left: the first row and the first column.
        rows, columns: the size.
    """

    top: int
    left: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"[{self.top}:{self.top + self.rows}, {self.left}:{self.left + self.columns}]"

    def intersect(self, other: Region) -> Region | None:
        """Return the common part of two regions; None if they have none."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        rows = min(self.top + self.rows, other.top + other.rows) - top
        columns = min(self.left + self.columns, other.left + other.columns) - left
        return Region(top, left, rows, columns) if rows > 0 and columns > 0 else None


def draw_losses(losses: Mapping[str, Mapping[int, float]], saved_after: int, tolerance: float, path: Path) -> None:
    """Draw the loss curves, and below them the differences between the resumed runs and the uninterrupted run.

    Args:
        losses: losses in nats per byte, by mesh and step; steps are counted from 1, the first mesh is uninterrupted.
        saved_after: the number of steps before the checkpoint.
        tolerance: the largest difference that is allowed, in nats per byte.
        path: the PNG file to write.
    """
    (whole, full), *resumed = losses.items()
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
    upper.plot(list(full), list(full.values()), color="0.75", linewidth=5, label=f"{pretty(whole)}, uninterrupted")
    for (mesh, curve), colour, marker in zip(resumed, ("tab:blue", "tab:red"), ("o", "x")):
        look = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1}
        upper.plot(list(curve), list(curve.values()), **look, label=f"resumed on {pretty(mesh)}")
        # A logarithmic axis has no zero, so equal losses are drawn at its lower end.
        lower.plot(list(curve), [max(abs(loss - full[step]), 1e-8) for step, loss in curve.items()], **look)
    for axes in (upper, lower):
        axes.axvline(saved_after + 0.5, color="0.4", linestyle=":")
        axes.grid(alpha=0.3)
    upper.annotate("checkpoint", (saved_after + 0.8, max(full.values())), color="0.4", va="top")
    lower.axhline(tolerance, color="0.4", linestyle="--")
    lower.annotate("allowed", (1, tolerance), color="0.4", xytext=(0, -3), textcoords="offset points", va="top")
    lower.set(yscale="log", ylim=(7e-9, tolerance * 5), xlabel="step", ylabel="difference\n(1e-8: none)")
    upper.set(
        ylabel="loss (nats per byte)", title="Restored on other meshes (fsdp x tensor), the loss goes on as it was"
    )
    upper.legend()
    figure.savefig(path, dpi=130)


def draw_boxes(layouts: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the boxes of two tensors on each mesh.

    Args:
        layouts: layouts by mesh and key; the first mesh saved the checkpoint.
        path: the PNG file to write.
    """
    saved_on = next(iter(layouts))
    figure = Figure(figsize=(5 * len(layouts), 9), layout="constrained")
    grid = figure.subplots(len(DRAWN), len(layouts), squeeze=False)
    for row, key in zip(grid, DRAWN):
        for axes, mesh in zip(row, layouts):
            draw_tensor(axes, layouts[mesh][key], layouts[saved_on][key])
            done = "saved" if mesh == saved_on else "restored"
            axes.set_title(f"{key.removeprefix('model.')}\n{done} on {pretty(mesh)}", fontsize=11)
        row[0].set_ylabel("dimension 0")
    for axes in grid[-1]:
        axes.set_xlabel("dimension 1")
    meaning = [
        Patch(facecolor=COLOURS[0], edgecolor="black", label="box: the region of the tensor that a device holds"),
        Patch(facecolor=COLOURS[0], edgecolor="white", hatch="//", label="box with replicas on several devices"),
        Line2D([], [], **CHUNKS, label="border of a saved chunk"),
    ]
    figure.legend(handles=meaning, loc="outside lower center", ncols=3)
    figure.suptitle("The same tensors on three meshes (fsdp x tensor)", fontsize=14)
    figure.savefig(path, dpi=110)


def draw_tensor(axes: Axes, layout: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Draw one tensor's boxes, and over them the borders of its saved chunks."""
    height, width = layout["shape"]
    chunks = holders(saved)
    for number, (box, devices) in enumerate(holders(layout).items()):
        hatch = "//" if len(devices) > 1 else None
        fill: dict[str, Any] = {"facecolor": COLOURS[number % len(COLOURS)], "edgecolor": "white", "hatch": hatch}
        axes.add_patch(Rectangle((box.left, box.top), box.columns, box.rows, **fill))
        axes.add_patch(
            Rectangle((box.left, box.top), box.columns, box.rows, fill=False, edgecolor="black", linewidth=1.8)
        )
        # Write in the middle of a part that lies in one saved chunk, so that no border crosses the text.
        label(axes, box, devices, next(part for part in map(box.intersect, chunks) if part), box.columns < width / 3)
    # Draw each border once: dashes drawn twice fill each other's gaps.
    for ends in {end for chunk in chunks for end in borders(chunk)}:
        axes.plot(*zip(*ends), **CHUNKS)
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[0, width], yticks=[0, height])


def label(axes: Axes, box: Region, devices: Sequence[str], middle_of: Region, narrow: bool) -> None:
    """Write a box's devices and ranges into the middle of a region."""
    text = f"device{'s' * (len(devices) > 1)} {', '.join(devices)}  {box}"
    if narrow:
        text = text.replace("  ", "\n").replace(", ", ",\n")
    ground = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5}
    where = middle_of.left + middle_of.columns / 2, middle_of.top + middle_of.rows / 2
    axes.text(*where, text, ha="center", va="center", fontsize=8, bbox=ground, zorder=3)


def holders(layout: Mapping[str, Any]) -> dict[Region, list[str]]:
    """Return the devices that hold each distinct box."""
    devices: dict[Region, list[str]] = {}
    for shard in layout["shards"]:
        box = Region(*shard["offsets"], *shard["sizes"])
        devices.setdefault(box, []).append(shard["device"].removeprefix("CPU:"))
    return devices


def borders(box: Region) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the four sides of a box as pairs of (x, y)."""
    top, left, bottom, right = box.top, box.left, box.top + box.rows, box.left + box.columns
    yield (left, top), (right, top)
    yield (left, bottom), (right, bottom)
    yield (left, top), (left, bottom)
    yield (right, top), (right, bottom)


def pretty(mesh: str) -> str:
    """Return a mesh's name for people: "4 x 2" for "4x2"."""
    return mesh.replace("x", " x ")

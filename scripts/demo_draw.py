"""The demo's pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from torch_xla_ckpt.layout import Box

COLOURS = matplotlib.color_sequences["Set2"]
CHUNKS: dict[str, Any] = {"color": "darkred", "linestyle": "--", "linewidth": 1.4}
# One tensor that is tiled in both dimensions, and one that leaves an axis of the mesh to replicas.
DRAWN = ("model.model.layers.0.mlp.down_proj.weight", "model.model.embed_tokens.weight")


def draw_losses(losses: Mapping[str, Mapping[int, float]], saved_after: int, tolerance: float, path: Path) -> None:
    """The loss curves, and below them how far the resumed ones are from the first, which was not interrupted.

    Args:
        losses: by mesh and step, counted from 1; nats per byte.
        saved_after: the step after which the checkpoint was saved.
        tolerance: the largest difference that is allowed.
        path: of the PNG.
    """
    (whole, full), *resumed = losses.items()
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
    upper.plot(list(full), list(full.values()), color="0.75", linewidth=5, label=f"{pretty(whole)}, uninterrupted")
    for (mesh, curve), colour, marker in zip(resumed, ("tab:blue", "tab:red"), ("o", "x")):
        look = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1}
        upper.plot(list(curve), list(curve.values()), **look, label=f"resumed on {pretty(mesh)}")
        # A logarithmic axis has no place for zero: equal losses lie on its floor.
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
    """Where the pieces of two tensors lie on each mesh.

    Args:
        layouts: by mesh and key; the first mesh is the one that saved.
        path: of the PNG.
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
        Patch(facecolor=COLOURS[0], edgecolor="black", label="box: what a device holds of the tensor"),
        Patch(facecolor=COLOURS[0], edgecolor="white", hatch="//", label="box with replicas on several devices"),
        Line2D([], [], **CHUNKS, label="border of a saved chunk"),
    ]
    figure.legend(handles=meaning, loc="outside lower center", ncols=3)
    figure.suptitle("The same tensors on three meshes (fsdp x tensor)", fontsize=14)
    figure.savefig(path, dpi=110)


def draw_tensor(axes: Axes, layout: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """One tensor's boxes, and over them the borders of the chunks it was saved in."""
    height, width = layout["shape"]
    chunks = holders(saved)
    for number, (box, devices) in enumerate(holders(layout).items()):
        (top, left), (rows, columns) = box.offsets, box.sizes
        hatch = "//" if len(devices) > 1 else None
        fill: dict[str, Any] = {"facecolor": COLOURS[number % len(COLOURS)], "edgecolor": "white", "hatch": hatch}
        axes.add_patch(Rectangle((left, top), columns, rows, **fill))
        axes.add_patch(Rectangle((left, top), columns, rows, fill=False, edgecolor="black", linewidth=1.8))
        # In the middle of one saved chunk's part, where no border runs through the words.
        label(axes, box, devices, next(part for part in map(box.intersect, chunks) if part), columns < width / 3)
    # Each border once: dashes drawn twice fill each other's gaps.
    for ends in {end for chunk in chunks for end in borders(chunk)}:
        axes.plot(*zip(*ends), **CHUNKS)
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[0, width], yticks=[0, height])


def label(axes: Axes, box: Box, devices: Sequence[str], place: Box, narrow: bool) -> None:
    """Write a box's devices and ranges in the middle of ``place``."""
    (top, left), (rows, columns) = place.offsets, place.sizes
    text = f"device{'s' * (len(devices) > 1)} {', '.join(devices)}  {box}"
    if narrow:
        text = text.replace("  ", "\n").replace(", ", ",\n")
    ground = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5}
    where = left + columns / 2, top + rows / 2
    axes.text(*where, text, ha="center", va="center", fontsize=8, bbox=ground, zorder=3)


def holders(layout: Mapping[str, Any]) -> dict[Box, list[str]]:
    """The devices that hold each distinct box."""
    devices: dict[Box, list[str]] = {}
    for shard in layout["shards"]:
        box = Box(tuple(shard["offsets"]), tuple(shard["sizes"]))
        devices.setdefault(box, []).append(shard["device"].removeprefix("CPU:"))
    return devices


def borders(box: Box) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The four sides of a box as pairs of (x, y)."""
    (top, left), (rows, columns) = box.offsets, box.sizes
    bottom, right = top + rows, left + columns
    yield (left, top), (right, top)
    yield (left, bottom), (right, bottom)
    yield (left, top), (left, bottom)
    yield (right, top), (right, bottom)


def pretty(mesh: str) -> str:
    return mesh.replace("x", " x ")

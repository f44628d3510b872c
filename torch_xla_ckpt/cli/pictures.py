"""Pictures of layouts, drawn with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.inspecting import Explanation, Layout, shown
from torch_xla_ckpt.layout import Box

_MOST_TENSORS = 4
_MOST_NAMED = 64  # boxes whose holder is written into them


def draw_layout(layout: Layout, path: str) -> None:
    """Draw who held which box of a tensor, beside the stored chunks.

    Args:
        layout: the tensor's layout.
        path: the file to write. Its ending gives the format: ".png", ".svg" or ".pdf".

    Raises:
        CheckpointError: matplotlib cannot write such a file.
    """
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    held = list(layout.holders().items())
    draw_boxes(left, layout.shape, held, "held by devices" if layout.devices else "written by")
    chunks = [(one.box, f"{n}") for n, one in enumerate(layout.chunks)]
    draw_boxes(right, layout.shape, chunks, f"{len(chunks)} stored {'chunk' if len(chunks) == 1 else 'chunks'}")
    shape = " x ".join(map(str, layout.shape)) or "scalar"
    figure.suptitle(f"{shown(layout.key)}  ({shape})".replace("$", r"\$"))
    save(figure, path)


def draw_plan(plan: Explanation, path: str) -> None:
    """Draw the saved chunks of the largest tensors beside the boxes that devices need.

    Args:
        plan: the plan.
        path: the file to write, as for ``draw_layout``.

    Raises:
        CheckpointError: there is no tensor to draw, or matplotlib cannot write such a file.
    """
    largest = sorted(plan.tensors, key=lambda one: -math.prod(one.shape))[:_MOST_TENSORS]
    if not largest:
        raise CheckpointError(f"{plan.path} has no tensor to draw")
    figure = Figure(figsize=(9, 3.2 * len(largest)), layout="constrained")
    rows = figure.subplots(len(largest), 2, squeeze=False)
    for (left, right), tensor in zip(rows, largest):
        name = shown(tensor.key).replace("$", r"\$")
        draw_boxes(left, tensor.shape, [(box, "") for box in tensor.saved], f"{name}\nsaved chunks")
        draw_boxes(right, tensor.shape, [(box, "") for box in tensor.needed], f"needed: {tensor.spec}")
    save(figure, path)


def draw_boxes(axes: Axes, shape: Sequence[int], boxes: Sequence[tuple[Box, str]], title: str) -> None:
    """Draw boxes of a tensor as rectangles of two dimensions: the last two, or those that are cut.

    Args:
        axes: where to draw.
        shape: the tensor's shape.
        boxes: each box with the text inside of it.
        title: the title.
    """
    split = [dim for dim in range(len(shape)) if len({box.offsets[dim] for box, _ in boxes}) > 1]
    dims = _two(split, len(shape))
    rows, columns = (shape[dim] if dim is not None else 1 for dim in dims)
    colours = colormaps["tab20"]
    for number, (box, text) in enumerate(boxes):
        (top, height), (left, width) = ((box.offsets[d], box.sizes[d]) if d is not None else (0, 1) for d in dims)
        face = colours(number % colours.N)
        axes.add_patch(Rectangle((left, top), width, height, facecolor=face, edgecolor="white", linewidth=0.8))
        if len(boxes) <= _MOST_NAMED:
            axes.text(left + width / 2, top + height / 2, text, ha="center", va="center", fontsize=8)
    axes.set_xlim(0, max(columns, 1))
    axes.set_ylim(max(rows, 1), 0)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("" if dims[1] is None else f"dimension {dims[1]}")
    axes.set_ylabel("" if dims[0] is None else f"dimension {dims[0]}")


def save(figure: Figure, path: str) -> None:
    """Write a figure to a file.

    Raises:
        CheckpointError: matplotlib knows no format with the file's ending.
    """
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise CheckpointError(
            f"cannot draw into {path}: {error}. Name a file that ends with .png, .svg or .pdf"
        ) from error


def _two(split: Sequence[int], ndim: int) -> tuple[int | None, int | None]:
    """Return the two dimensions to draw, rows and columns: those that are cut, filled up with the last ones."""
    chosen = list(split[:2])
    chosen += [dim for dim in reversed(range(ndim)) if dim not in chosen][: 2 - len(chosen)]
    chosen.sort()
    return (None, None) if not chosen else (None, chosen[0]) if len(chosen) == 1 else (chosen[0], chosen[1])

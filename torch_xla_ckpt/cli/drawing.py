"""The option ``-o`` of commands that draw. matplotlib is imported on first use, because that takes a second."""

from __future__ import annotations

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.inspecting import Explanation, Layout

PICTURE = "a PNG, SVG or PDF file"


def draw(what: Layout | Explanation, path: str) -> None:
    """Draw a layout or a plan into a file.

    Raises:
        CheckpointError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from torch_xla_ckpt.cli import pictures
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"drawing needs {(error.name or '').partition('.')[0]}. Install it with: pip install "
            "'torch_xla_ckpt[cli]'. Or leave out -o"
        ) from error
    if isinstance(what, Layout):
        pictures.draw_layout(what, path)
    else:
        pictures.draw_plan(what, path)

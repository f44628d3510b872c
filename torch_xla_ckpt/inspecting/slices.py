"""Slices written as text, such as ``w[0:4, :8]``: parsed, never evaluated."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box

_SLICED = re.compile(r"(?P<key>.*)\[(?P<slices>[^\[\]]*)\]", re.DOTALL)
_NUMBER = r"\s*([+-]?\d{1,18})?\s*"
_PART = re.compile(rf"{_NUMBER}(?:(:){_NUMBER}(?::{_NUMBER})?)?")


class Region(NamedTuple):
    """A region of a tensor, and what to leave out of it after it was read.

    Args:
        box: the smallest box that holds the region.
        steps: the step in each dimension.
        dropped: the dimensions that an index selects, which the result lacks.
    """

    box: Box
    steps: tuple[int, ...]
    dropped: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of selected indices in each dimension, those that an index selects included."""
        return tuple(-(-n // step) for n, step in zip(self.box.sizes, self.steps))


def split_key(text: str, keys: Collection[str]) -> tuple[str, str | None]:
    """Return the key and the text of its slices; None if there are no slices.

    Args:
        text: what the user wrote. A whole key wins, even if it ends with brackets.
        keys: the keys of the checkpoint.
    """
    match = _SLICED.fullmatch(text)
    if text in keys or match is None or match["key"] not in keys:
        return text, None
    return match["key"], match["slices"]


def parse_region(slices: str | None, shape: tuple[int, ...]) -> Region:
    """Return the region of a tensor that slices select, with Python's meaning of negative and of missing numbers.

    Args:
        slices: the text between the brackets; None for the whole tensor.
        shape: the tensor's shape.

    Raises:
        CheckpointError: the text is no slice, or does not fit the shape.
    """
    parts = [] if slices is None or not slices.strip() else slices.split(",")
    if sum(part.strip() == "..." for part in parts) > 1:
        raise _bad(slices, shape, "it has more than one '...'")
    if "..." in (stripped := [part.strip() for part in parts]):
        at = stripped.index("...")
        parts[at : at + 1] = [":"] * (len(shape) - len(parts) + 1)
    parts += [":"] * (len(shape) - len(parts))
    if len(parts) > len(shape):
        raise _bad(slices, shape, f"it has {len(parts)} dimensions, and the tensor has {len(shape)}")
    offsets, sizes, steps, dropped = [], [], [], []
    for dim, (part, extent) in enumerate(zip(parts, shape)):
        match = _PART.fullmatch(part)
        if match is None or not part.strip():
            raise _bad(slices, shape, f"{part.strip()!r} is no slice")
        first, colon, last, step = match.groups()
        if colon is None:
            index = int(first)
            if not -extent <= index < extent:
                raise _bad(slices, shape, f"the index {index} is outside of dimension {dim}, which has {extent}")
            offsets.append(index % extent)
            sizes.append(1)
            steps.append(1)
            dropped.append(dim)
            continue
        if step is not None and int(step) < 1:
            raise _bad(slices, shape, "steps must be positive")
        chosen = slice(*(None if n is None else int(n) for n in (first, last, step)))
        start, stop, stride = chosen.indices(extent)
        offsets.append(min(start, extent))
        sizes.append(max(0, stop - start))
        steps.append(stride)
    return Region(Box(tuple(offsets), tuple(sizes)), tuple(steps), tuple(dropped))


def _bad(slices: str | None, shape: tuple[int, ...], problem: str) -> CheckpointError:
    return CheckpointError(
        f"[{slices}] selects nothing from a tensor of shape {shape}: {problem}. Write slices as in Python, for example "
        "'w[0:4, :8]' or 'w[-1]'"
    )

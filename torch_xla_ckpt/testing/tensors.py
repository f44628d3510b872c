"""Two tensors, compared by the shards that this rank holds of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.state import TensorHandle
from torch_xla_ckpt.testing.elements import Found, element, element_text, first_difference, rows_of_tensor, two_values


def tensor_difference(key: str, a: TensorHandle, b: TensorHandle) -> str | None:
    """Return what differs between the bits of two tensors; None if nothing does."""
    number, first, values = 0, None, ""
    for box, x, y in _common_boxes(key, a, b):
        found = first_difference(rows_of_tensor(x), rows_of_tensor(y), box.sizes)
        if found is None:
            continue
        number += found.number
        index = tuple(offset + n for offset, n in zip(box.offsets, found.at))
        if first is None or index < first:
            bits = (rows_of_tensor(t)[found.flat].tobytes() for t in (x, y))
            first, values = index, two_values(element(x, found.flat), element(y, found.flat), *bits)
    if first is None:
        return None
    return element_text(Found(number, first, 0), Box.whole(a.layout.shape).volume, values)


def _common_boxes(key: str, a: TensorHandle, b: TensorHandle) -> Iterator[tuple[Box, torch.Tensor, torch.Tensor]]:
    """Yield the boxes that this rank holds of both tensors, with their data on the host.

    Raises:
        ValueError: this rank holds different regions of the tensors.
    """
    shards_a, shards_b = _fetched(a), _fetched(b)
    if shards_a.keys() == shards_b.keys():
        for box, data in shards_a.items():
            yield box, data, shards_b[box]
        return
    whole = Box.whole(a.layout.shape)
    if any(sum(box.volume for box in shards) != whole.volume for shards in (shards_a, shards_b)):
        raise ValueError(
            f"{key}: this rank holds different regions of the two tensors, so it cannot compare them: "
            f"{_listed(shards_a)} and {_listed(shards_b)}. Shard both tensors alike over the ranks"
        )
    yield whole, _assembled(whole, shards_a), _assembled(whole, shards_b)


def _fetched(handle: TensorHandle) -> dict[Box, torch.Tensor]:
    """Return the data of each distinct box that this rank holds, on the host."""
    shards: dict[Box, torch.Tensor] = {}
    for part in sorted(set(handle.layout.parts.values())):
        shards.update(handle.access.fetch(handle.tensor, handle.layout, part))
    return shards


def _assembled(whole: Box, shards: Mapping[Box, torch.Tensor]) -> torch.Tensor:
    """Return a whole tensor made of its boxes."""
    if whole in shards:
        return shards[whole]
    dtype = next(iter(shards.values())).dtype
    # torch cannot copy some dtypes of one byte.
    bits = torch.uint8 if dtype.itemsize == 1 else dtype
    full = torch.empty(whole.sizes, dtype=bits)
    for box, data in shards.items():
        full[box.slices] = data.view(bits)
    return full.view(dtype)


def _listed(boxes: Mapping[Box, torch.Tensor]) -> str:
    return ", ".join(str(box) for box in list(boxes)[:3]) + (", ..." if len(boxes) > 3 else "") or "nothing"

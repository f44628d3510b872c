"""Host copies of device shards: fetched when first asked for, dropped when last used."""

from __future__ import annotations

import io
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from torch_xla_ckpt.device import Snapshot, require_target
from torch_xla_ckpt.device import access_of as _access_of
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box, TensorLayout
from torch_xla_ckpt.protocols import TensorAccess


class TensorHandle(NamedTuple):
    """A tensor of a state dict with its layout and the way to its data."""

    tensor: torch.Tensor
    layout: TensorLayout
    access: TensorAccess

    def gather(self) -> torch.Tensor:
        """The whole tensor on the host.

        Raises:
            CheckpointError: this process does not hold all of it.
        """
        whole = Box.whole(self.layout.shape)
        shards: dict[Box, torch.Tensor] = {}
        for part in sorted(set(self.layout.parts.values())):
            shards.update(self.access.fetch(self.tensor, self.layout, part))
        if whole in shards:
            return compact(shards[whole])
        held = sum(box.volume for box in self.layout.boxes)
        if held != whole.volume:
            raise CheckpointError(
                f"a tensor of shape {self.layout.shape} inside an object (a tuple, say) is sharded over several "
                "processes, and one process cannot write all of it. Put the tensor in a dict or list of its own"
            )
        full = torch.empty(self.layout.shape, dtype=self.layout.dtype)
        for box in self.layout.boxes:
            full[box.slices] = shards[box]
        return full


def lay_out(
    tensors: Mapping[str, torch.Tensor], access_of: Callable[[torch.Tensor], TensorAccess]
) -> dict[str, TensorHandle]:
    """Layouts of tensors, after all pending computation has been awaited.

    Raises:
        CheckpointError: a tensor is of a kind that has no layout. The key is named.
    """
    # A snapshot knows best, also where a planner was told how to read live tensors.
    accesses = {key: (_access_of if isinstance(t, Snapshot) else access_of)(t) for key, t in tensors.items()}
    for access in {type(access): access for access in accesses.values()}.values():
        access.settle()
    laid_out = {}
    for key, tensor in tensors.items():
        try:
            laid_out[key] = TensorHandle(tensor, accesses[key].layout(tensor), accesses[key])
        except CheckpointError as error:
            raise CheckpointError(f"{key!r}: {error}") from error
    return laid_out


def require_savable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Show that tensors have dtypes that torch can pickle.

    Raises:
        CheckpointError: one has not. The key is named.
    """
    for key, tensor in tensors.items():
        if not tensor.is_quantized and not _can_be_pickled(tensor.dtype):
            raise CheckpointError(
                f"{key!r}: torch cannot pickle tensors of {tensor.dtype}, so they cannot be saved. Save its bytes, "
                "tensor.view(torch.uint8)"
            )


@lru_cache(maxsize=256)
def _can_be_pickled(dtype: torch.dtype) -> bool:
    """Whether torch pickles tensors of a dtype without their bytes, as checkpoints need it."""
    try:
        with torch.serialization.skip_data():
            torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except Exception:  # KeyError for torch.uint2
        return False
    return True


def require_targets(tensors: Mapping[str, torch.Tensor]) -> None:
    """Show that data can be loaded into tensors in place.

    Raises:
        CheckpointError: it cannot. The key is named.
    """
    for key, tensor in tensors.items():
        try:
            require_target(tensor)
        except CheckpointError as error:
            raise CheckpointError(f"{key!r}: {error}") from error


class ShardSource:
    """Serves boxes of tensors as host tensors, from several threads.

    The shards of a part of a tensor, most often of all of it, are fetched together at the first request for one of
    them, as the device runtime offers no less, and let go when every box that was announced has been served.
    """

    def __init__(self, tensors: Mapping[str, TensorHandle]):
        self._tensors = tensors
        self._announced: Counter[tuple[str, int]] = Counter()
        self._fetched: dict[tuple[str, int], Mapping[Box, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def announce(self, boxes: Iterable[tuple[str, Box]]) -> None:
        """Say what will be asked for."""
        self._announced = Counter((key, self.part(key, box)) for key, box in boxes)

    def part(self, key: str, box: Box) -> int:
        """Which part of its tensor a box is fetched with."""
        return self._tensors[key].layout.part_of(box) if box.volume else 0

    def take(self, key: str, box: Box) -> torch.Tensor:
        """The elements of ``box``, in a contiguous host tensor with a storage of just its size."""
        held = self._tensors[key]
        if box.volume == 0:
            return torch.empty(box.sizes, dtype=held.layout.dtype)
        part = key, self.part(key, box)
        with self._lock:
            shards = self._fetched.pop(part, None)
            if shards is None:
                shards = held.access.fetch(held.tensor, held.layout, part[1])
            self._announced[part] -= 1
            if self._announced[part] > 0:
                self._fetched[part] = shards
        if box in shards:
            return compact(shards[box])
        source = next(outer for outer in shards if outer.contains(box))
        return compact(shards[source][box.relative_to(source).slices])


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` contiguous and alone in its storage: writers that pickle a tensor write its whole storage."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if alone else tensor.clone()

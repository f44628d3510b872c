"""Tensors of a state dict with their layouts, and host copies of their shards."""

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
    """A tensor of a state dict, with its layout and the access to its data."""

    tensor: torch.Tensor
    layout: TensorLayout
    access: TensorAccess

    def gather(self) -> torch.Tensor:
        """Return the whole tensor in host memory.

        Raises:
            CheckpointError: this process does not hold all elements.
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
                f"a tensor of shape {self.layout.shape} inside an object (a tuple, for example) is sharded over "
                "several processes, and one process cannot write all of it. Put the tensor into a dict or a list"
            )
        full = torch.empty(self.layout.shape, dtype=self.layout.dtype)
        for box in self.layout.boxes:
            full[box.slices] = shards[box]
        return full


def lay_out(
    tensors: Mapping[str, torch.Tensor], access_of: Callable[[torch.Tensor], TensorAccess]
) -> dict[str, TensorHandle]:
    """Wait for all pending computation, and return the tensors with their layouts.

    Args:
        tensors: tensors by key.
        access_of: returns the access to a tensor.

    Raises:
        CheckpointError: a tensor is of a kind that cannot be saved or loaded, or its layout cannot be read. The key is
            named. Or the pending computation failed.
    """
    # Snapshots are read in their own way, even if the planner was given an access for live tensors.
    accesses = {key: (_access_of if isinstance(t, Snapshot) else access_of)(t) for key, t in tensors.items()}
    for access in {type(access): access for access in accesses.values()}.values():
        _settle(access)
    laid_out = {}
    for key, tensor in tensors.items():
        try:
            laid_out[key] = TensorHandle(tensor, accesses[key].layout(tensor), accesses[key])
        except CheckpointError as error:
            raise CheckpointError(f"{key!r}: {error}") from error
        except Exception as error:
            raise _unreadable(key, tensor, error) from error
    return laid_out


def gathered(tensor: torch.Tensor, access_of: Callable[[torch.Tensor], TensorAccess]) -> torch.Tensor:
    """Return a tensor inside an object whole, in host memory.

    Raises:
        CheckpointError: the tensor is of a kind that cannot be saved, or this process does not hold all elements. The
            message names no key.
    """
    access = access_of(tensor)
    _settle(access)
    return TensorHandle(tensor, access.layout(tensor), access).gather()


def fetched(key: str, held: TensorHandle, part: int = 0) -> Mapping[Box, torch.Tensor]:
    """Return the shards of one part of a tensor in host memory.

    Args:
        key: the tensor's key, for errors.
        held: the tensor.
        part: the number of the part. Default: 0.

    Raises:
        CheckpointError: the tensor cannot be read. The key is named.
    """
    try:
        return held.access.fetch(held.tensor, held.layout, part)
    except CheckpointError:
        raise
    except Exception as error:
        raise _unreadable(key, held.tensor, error) from error


def _settle(access: TensorAccess) -> None:
    try:
        access.settle()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the computation that the tensors are waiting for failed ({type(error).__name__}: {error}). Call "
            "torch_xla.sync() and xm.wait_device_ops() before, to see where it fails"
        ) from error


def _unreadable(key: str, tensor: torch.Tensor, error: Exception) -> CheckpointError:
    """Return the error for a tensor whose data or layout torch does not give."""
    what = f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} on {tensor.device}"
    return CheckpointError(
        f"{key!r}: {what} could not be read ({type(error).__name__}: {error}). See whether tensor.cpu() raises the "
        "same error, which then comes from torch or the device; or leave the tensor out"
    )


def require_savable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that torch can pickle the tensors' dtypes.

    Raises:
        CheckpointError: torch cannot pickle a tensor. The key is named.
    """
    for key, tensor in tensors.items():
        if not tensor.is_quantized and not _can_be_pickled(tensor.dtype):
            raise CheckpointError(
                f"{key!r}: torch cannot pickle tensors of {tensor.dtype}, so they cannot be saved. Save the "
                "tensor's bytes instead: tensor.view(torch.uint8)"
            )


@lru_cache(maxsize=256)
def _can_be_pickled(dtype: torch.dtype) -> bool:
    """Whether torch can pickle tensors of a dtype without their data, as checkpoints need."""
    try:
        with torch.serialization.skip_data():
            torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
    except Exception:  # KeyError for torch.uint2
        return False
    return True


def require_targets(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that data can be loaded into the tensors in place.

    Raises:
        CheckpointError: a tensor cannot be loaded in place. The key is named.
    """
    for key, tensor in tensors.items():
        try:
            require_target(tensor)
        except CheckpointError as error:
            raise CheckpointError(f"{key!r}: {error}") from error


class ShardSource:
    """Returns boxes of tensors as host tensors, to several threads.

    The device runtime fetches all shards of a tensor together. So the first request for a box fetches all shards of the
    tensor, or of one of its parts if it has several. They are released when all announced boxes were taken.
    """

    def __init__(self, tensors: Mapping[str, TensorHandle]):
        self._tensors = tensors
        self._announced: Counter[tuple[str, int]] = Counter()
        self._fetched: dict[tuple[str, int], Mapping[Box, torch.Tensor]] = {}
        self._lock = threading.Lock()

    def announce(self, boxes: Iterable[tuple[str, Box]]) -> None:
        """Announce all boxes that will be taken, as pairs of key and box."""
        self._announced = Counter((key, self.part(key, box)) for key, box in boxes)

    def part(self, key: str, box: Box) -> int:
        """Return the number of the part that ``box`` is fetched with."""
        return self._tensors[key].layout.part_of(box) if box.volume else 0

    def take(self, key: str, box: Box) -> torch.Tensor:
        """Return the elements of ``box`` as a contiguous host tensor whose storage has the same size."""
        held = self._tensors[key]
        if box.volume == 0:
            return torch.empty(box.sizes, dtype=held.layout.dtype)
        part = key, self.part(key, box)
        with self._lock:
            shards = self._fetched.pop(part, None)
            if shards is None:
                shards = fetched(key, held, part[1])
            self._announced[part] -= 1
            if self._announced[part] > 0:
                self._fetched[part] = shards
        try:
            if box in shards:
                return compact(shards[box])
            source = next(outer for outer in shards if outer.contains(box))
            return compact(shards[source][box.relative_to(source).slices])
        except RuntimeError as error:  # there is no memory for the copy, for example
            raise _unreadable(key, held.tensor, error) from error


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor contiguous, in a storage of its own: writers that pickle a tensor write its whole storage."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if alone else tensor.clone()

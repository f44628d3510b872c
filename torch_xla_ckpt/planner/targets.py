"""Tensors of the target while their data arrives: host buffers, tied weights, and the transfer to the devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from torch_xla_ckpt.device import alias_of, data_changed
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.state import Buffers, TensorHandle, lay_out, require_targets

logger = logging.getLogger(__name__)


class TensorTarget:
    """A tensor being loaded. Each distinct box has one host buffer until all boxes are complete.

    Args:
        handle: the tensor, its layout, and the access that writes to it.
        pool: allocates the buffers.

    Attributes:
        boxes: the distinct boxes to fill.
        pending_reads: number of reads that have not been committed.
        tied: the keys that share this tensor; None if no other key does.
    """

    def __init__(self, handle: TensorHandle, pool: Buffers):
        self.handle = handle
        self.boxes = handle.layout.boxes
        self.pending_reads = 0
        self.tied: TiedTargets | None = None
        self._pool = pool
        self._buffers: dict[Box, torch.Tensor] = {}
        self._own_memory: torch.Tensor | None = None
        self._box_at = {torch.Size(box.offsets): box for box in self.boxes}

    def expect(self, reads: int) -> None:
        """Set the number of reads that fill the tensor.

        A tensor in host memory that one read fills is never half loaded. It is read into directly, without a buffer.
        """
        self.pending_reads = reads
        if reads == 1 and self.tied is None:
            self._own_memory = self.handle.access.memory(self.handle.tensor)

    @property
    def needs_no_buffer(self) -> bool:
        return self._own_memory is not None

    def shard(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory to read the box at ``index`` into, without padding."""
        if self._own_memory is not None:
            return self._own_memory
        assert index.offset is not None
        box = self._box_at[index.offset]
        if box not in self._buffers:
            layout = self.handle.layout
            buffer = self._pool.empty(layout.shard_shape, layout.dtype)
            # Nothing reads the padding, but data of earlier users of this memory must not reach the devices.
            self._buffers[box] = buffer if box.sizes == layout.shard_shape else buffer.zero_()
        return self._buffers[box][tuple(slice(n) for n in box.sizes)]

    def adopt(self, index: MetadataIndex, tensor: torch.Tensor) -> bool:
        """Use ``tensor`` as the buffer of the box at ``index``; return False if its shape or dtype does not fit."""
        assert index.offset is not None
        box, layout = self._box_at[index.offset], self.handle.layout
        fits = tuple(tensor.shape) == box.sizes == layout.shard_shape and tensor.dtype == layout.dtype
        if self._own_memory is not None or not fits:
            return False
        self._buffers[box] = tensor
        return True

    def put(self) -> int:
        """Move the complete buffers to the devices, and return their size in bytes.

        A tied tensor is moved once, when the buffers of its last key are complete; before that this returns 0.
        """
        if self._own_memory is not None:
            data_changed(self.handle.tensor)
            return 0
        return self.put_buffers() if self.tied is None else self.tied.put()

    def put_buffers(self) -> int:
        """Move this key's buffers to the devices, and return their size in bytes."""
        self.handle.access.put(self.handle.tensor, self.handle.layout, self._buffers)
        nbytes = sum(buffer.nbytes for buffer in self._buffers.values())
        self.drop()
        return nbytes

    def drop(self) -> None:
        """Release the buffers."""
        self._buffers = {}

    def equals(self, other: TensorTarget) -> bool:
        """Whether the buffers of two complete targets of one layout are equal, bit for bit."""
        return all(torch.equal(_bits(self._buffers[box]), _bits(other._buffers[box])) for box in self.boxes)


class TiedTargets:
    """Keys of the target that share one tensor, such as tied weights.

    The checkpoint may have different values for these keys. As with ``load_state_dict``, the tensor gets the values of
    the last key. A warning names the keys whose values were dropped.

    Args:
        targets: the targets by key, in the order of the state dict.
    """

    def __init__(self, targets: Mapping[str, TensorTarget]):
        self._targets = targets
        self._incomplete = len(targets)

    def put(self) -> int:
        """Count one more key as complete. After the last key, move its buffers and return their size in bytes."""
        self._incomplete -= 1
        if self._incomplete:
            return 0
        *others, (last_key, last) = self._targets.items()
        different = [key for key, target in others if not target.equals(last)]
        if different:
            logger.warning(
                "these keys share one tensor in the target, and the checkpoint has different values for them: %s. The "
                "tensor has the values of %r. To load the other values too, give each key its own tensor",
                ", ".join([*different, last_key]),
                last_key,
            )
        for _, target in others:
            target.drop()
        return last.put_buffers()


def tie_shared(targets: Mapping[str, TensorTarget]) -> None:
    """Find targets that share one tensor, and tie them."""
    by_tensor: dict[Hashable, dict[str, TensorTarget]] = {}
    for key, target in targets.items():
        by_tensor.setdefault(alias_of(target.handle.tensor), {})[key] = target
    for shared in by_tensor.values():
        if len(shared) > 1:
            tied = TiedTargets(shared)
            for target in shared.values():
                target.tied = tied


def copy_into(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], access_of: Callable[[torch.Tensor], TensorAccess]
) -> None:
    """Copy whole host tensors into targets that may be sharded.

    Args:
        pairs: (target, host tensor) pairs of the same shape.
        access_of: returns the access that writes to a target.

    Raises:
        CheckpointError: data cannot be loaded into a target in place.
    """
    tensors = {str(number): target for number, (target, _) in enumerate(pairs)}
    handles = lay_out(tensors, access_of)
    require_targets(tensors)
    for handle, (_, value) in zip(handles.values(), pairs):
        target = TensorTarget(handle, Buffers())
        for box in target.boxes:
            target.shard(MetadataIndex("", box.offsets)).copy_(value[box.slices])
        if target.boxes:
            target.put()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)

"""Snapshots on the devices: copies of tensors, made by a graph of their own, and fetched while training goes on."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch_xla.runtime as xr
from torch_xla import _XLAC

from torch_xla_ckpt.device.xla.access import XlaAccess
from torch_xla_ckpt.device.xla.runtime import are_devices_virtual, await_devices, compute_pending
from torch_xla_ckpt.device.xla.sharding import apply, global_tensor, is_tiled, op_sharding_of, spec_of, tiles_of
from torch_xla_ckpt.layout import Box, Shard, TensorLayout
from torch_xla_ckpt.protocols import SnapshotData

_LEAST_KEPT = 1 << 20
"""Bytes, all devices together. Smaller copies are cheap to allocate, and overwriting them takes longer to compile."""

_SURVIVE_WHERE = frozenset(
    (
        *(torch.float32, torch.float64, torch.complex64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )
)
"""Dtypes whose every bit survives ``torch.where`` on virtual devices. They compute other dtypes in a wider one, which
changes NaNs."""


class _Cut(NamedTuple):
    """How a part was cut from its tensor.

    Args:
        dim: the dimension that was cut; None if the part is the whole tensor.
        start: first index of the part along ``dim``; within each tile if ``tile`` is given.
        tile: length of a tile along ``dim``. If given, ``dim`` was split into two dimensions: the number of the tile,
            and the index inside the tile.
    """

    dim: int | None = None
    start: int = 0
    tile: int | None = None

    def boxes_in_tensor(self, box: Box) -> Iterator[tuple[Box, tuple[Any, ...]]]:
        """Yield the boxes of the tensor that a box of the part holds, with the index of each box's data."""
        d, everything = self.dim, (slice(None),) * len(box.sizes)
        if d is None:
            yield box, everything
        elif self.tile is None:
            yield Box((*box.offsets[:d], box.offsets[d] + self.start, *box.offsets[d + 1 :]), box.sizes), everything
        else:
            for n in range(box.sizes[d]):
                first = (box.offsets[d] + n) * self.tile + self.start + box.offsets[d + 1]
                offsets = (*box.offsets[:d], first, *box.offsets[d + 2 :])
                sizes = (*box.sizes[:d], *box.sizes[d + 1 :])
                yield Box(offsets, sizes), (*everything[:d], n)


class _CopyKind(NamedTuple):
    """What two parts must have in common so that one's copy can be overwritten with the other.

    Args:
        shape, dtype: shape and dtype of the part.
        sharding: sharding spec of the part's tensor.
        cut: how the part was cut from its tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: str
    cut: _Cut


class _Part(NamedTuple):
    """A part of a tensor that will be copied.

    Args:
        data: the part, traced.
        kind: which copies the part can overwrite.
        sharding: the runtime's sharding object for the copy; None leaves the sharding to the compiler.
    """

    data: torch.Tensor
    kind: _CopyKind
    sharding: Any = None

    @property
    def is_large(self) -> bool:
        """Whether the memory of a copy is worth keeping."""
        return self.data.nbytes >= _LEAST_KEPT

    def clone(self) -> torch.Tensor:
        """Trace a copy in new memory."""
        copy = self.data.clone()
        apply(copy, self.sharding)
        return copy


@dataclass(frozen=True)
class _CopiedPart:
    """The copy of a part, and how the part was cut from its tensor."""

    data: torch.Tensor
    cut: _Cut


class _CopyGraph:
    """The graph that computes the copies of one snapshot."""

    def __init__(self) -> None:
        self._is_done = False

    def wait(self) -> None:
        """Wait until the devices have computed the copies."""
        if not self._is_done:
            await_devices()
            self._is_done = True


class DeviceCopy(SnapshotData):
    """The ``SnapshotData`` of one tensor, on the devices that hold the tensor. A large tensor has several parts."""

    def __init__(self, like: torch.Tensor, parts: Sequence[_CopiedPart], access: XlaAccess, graph: _CopyGraph):
        self._shape = tuple(like.shape)
        self._dtype = like.dtype
        self._sharding = spec_of(like) or "unmarked"
        self._parts = parts
        self._access = access
        self._graph = graph

    @cached_property
    def _layouts(self) -> list[TensorLayout]:
        self._graph.wait()
        return [self._access.layout(part.data) for part in self._parts]

    def layout(self) -> TensorLayout:
        shards = tuple(
            Shard(box, shard.device, number)
            for number, (part, layout) in enumerate(zip(self._parts, self._layouts))
            for shard in layout.shards
            for box, _ in part.cut.boxes_in_tensor(shard.box)
        )
        return TensorLayout(self._shape, self._dtype, shards, self._shape, self._sharding, identical=xr.is_spmd())

    def fetch(self, part: int) -> Mapping[Box, torch.Tensor]:
        copied = self._parts[part]
        shards = self._access.fetch(copied.data, self._layouts[part])
        return {
            box: shard[index] for outer, shard in shards.items() for box, index in copied.cut.boxes_in_tensor(outer)
        }

    def host_bytes(self, part: int) -> int:
        return self._access.host_bytes(self._parts[part].data, self._layouts[part])


class KeptCopies:
    """Device memory of released copies, which the next snapshot overwrites.

    For virtual devices only. Their memory is host memory, where new memory costs a page fault every 4 KiB. An
    accelerator's allocator keeps released memory anyway, and training needs that memory between saves.

    The kept memory never exceeds the memory of the last snapshot's copies.
    """

    def __init__(self) -> None:
        self._free: dict[_CopyKind, list[torch.Tensor]] = {}
        self._wanted: Counter[_CopyKind] = Counter()
        self._true: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on each device that are kept and not in use."""
        return sum(copied_bytes(tensor) for tensors in list(self._free.values()) for tensor in list(tensors))

    def drop(self) -> None:
        """Free the kept memory. Copies that are still in use will not be kept."""
        self._free, self._wanted = {}, Counter()

    def copies(self, parts: Sequence[_Part]) -> list[torch.Tensor]:
        """Trace a copy of each part.

        Either all large parts overwrite kept copies or none does, so that only two graphs are compiled.
        """
        self._wanted = wanted = Counter(part.kind for part in parts if part.is_large)
        free, self._free = self._free, {}
        if any(len(free.get(kind, ())) < number for kind, number in wanted.items()):
            return [part.clone() for part in parts]
        # Kept copies that are not overwritten are freed here. The allocator reuses their memory for the new copies.
        return [
            self._overwritten(free[part.kind].pop(), part.data)
            if part.is_large and part.data.dtype in _SURVIVE_WHERE
            else part.clone()
            for part in parts
        ]

    def give_back(self, copies: Iterable[tuple[_CopyKind, torch.Tensor]]) -> None:
        """Keep copies that nobody uses any more. Called in any thread, between any two instructions of another."""
        for kind, tensor in copies:
            tensors = self._free.setdefault(kind, [])
            if len(tensors) < self._wanted[kind]:
                tensors.append(tensor)

    def _overwritten(self, copy: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Trace ``data`` into the memory of ``copy``.

        The runtime reuses the memory of a tensor that is updated in place only if the graph reads the tensor. So the
        graph chooses between old and new data. The compiler does not know that the choice is always the new data.
        """
        if self._true is None:  # a parameter of the graph; the usual way of copying would make it a constant
            (self._true,) = _XLAC._xla_tensors_from_aten([torch.tensor(True)], [str(data.device)], [None])
        return copy.copy_(torch.where(self._true, data, copy))


def keeps_copies() -> bool:
    """Whether the memory of released copies is worth keeping, because the devices are virtual."""
    return are_devices_virtual()


def copy_on_devices(
    tensors: Sequence[torch.Tensor], access: XlaAccess, part_bytes: int, kept: KeptCopies | None = None
) -> list[DeviceCopy]:
    """Start copying tensors on their devices, and return without waiting.

    Pending computation is synced first, so that the training step's graph does not change. The copies are a graph of
    their own, and do not change the devices' seed.

    Args:
        tensors: the tensors; ``can_be_copied`` must hold for each.
        access: reads the copies.
        part_bytes: bytes of a tensor to fetch at a time. A tensor with more bytes on this process's devices is copied
            in parts, if it can be cut without moving data between devices.
        kept: memory of released copies to overwrite, which also takes these copies' memory back. Default: new memory.
    """
    compute_pending()
    tensors = [global_tensor(tensor) for tensor in tensors]
    with torch.no_grad():
        parts = [list(_parts(tensor.detach(), part_bytes)) for tensor in tensors]
        every_part = [part for own in parts for part in own]
        data = [part.clone() for part in every_part] if kept is None else kept.copies(every_part)
    # Sync the copies only. A full sync would change the seed, and reset what the program traces.
    _XLAC._xla_sync_multi(data, [], wait=False)
    graph = _CopyGraph()
    remaining = iter(data)
    copies = []
    for tensor, own in zip(tensors, parts):
        copied = [_CopiedPart(next(remaining), part.kind.cut) for part in own]
        copies.append(DeviceCopy(tensor, copied, access, graph))
        if kept is not None:
            owned = [(part.kind, copy.data) for part, copy in zip(own, copied)]
            weakref.finalize(copies[-1], kept.give_back, owned).atexit = False
    return copies


def can_be_copied(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements, and its copy can be fetched without another graph; complex128 needs one."""
    return tensor.dtype != torch.complex128 and tensor.numel() > 0


def copied_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a copy of the tensor takes on each device."""
    tensor = global_tensor(tensor)
    tiles = tiles_of(spec_of(tensor), tensor.ndim)
    return math.prod(-(-n // t) for n, t in zip(tensor.shape, tiles)) * tensor.itemsize


def _parts(tensor: torch.Tensor, part_bytes: int) -> Iterator[_Part]:
    """Cut a global tensor into parts of about ``part_bytes`` bytes; one part if it is small or cannot be cut."""
    spec = spec_of(tensor)
    tiled = is_tiled(spec)
    local = copied_bytes(tensor) * (len(_XLAC._xla_get_runtime_devices()) if tiled else 1)
    wanted = -(-local // part_bytes)
    tiles = tiles_of(spec, tensor.ndim)
    # Length of the tiles along each dimension that can be cut. All tiles of the dimension must have this length.
    lengths = {d: n // t for d, (n, t) in enumerate(zip(tensor.shape, tiles)) if n % t == 0 and n > t}
    if wanted <= 1 or not lengths:
        yield _Part(tensor, _CopyKind(tuple(tensor.shape), tensor.dtype, spec, _Cut()))
        return
    # Prefer the first dimension that is long enough, because then the data of a part is contiguous.
    dim = next((d for d, length in lengths.items() if length >= wanted), max(lengths, key=lambda d: lengths[d]))
    length, split = lengths[dim], tiles[dim] > 1
    step = -(-length // wanted)
    sharding = op_sharding_of(tensor) if tiled and not split else None
    if split:
        tensor = tensor.reshape(*tensor.shape[:dim], tiles[dim], length, *tensor.shape[dim + 1 :])
    for start in range(0, length, step):
        data = tensor.narrow(dim + split, start, min(step, length - start))
        cut = _Cut(dim, start, length if split else None)
        yield _Part(data, _CopyKind(tuple(data.shape), tensor.dtype, spec, cut), sharding)

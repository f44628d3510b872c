"""Tensors on XLA devices. The only module that imports torch_xla, and the only one that uses its private names."""

from __future__ import annotations

import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

try:
    import torch_xla  # noqa: F401  says whether it is there
except ImportError as error:
    raise ImportError(
        "this needs torch_xla, because it handles tensors on XLA devices. Install the pair that fits together: "
        "pip install 'torch_xla_ckpt[xla]'"
    ) from error
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla import _XLAC
from torch_xla.distributed.spmd import XLAShardedTensor

from torch_xla_ckpt.device import memory
from torch_xla_ckpt.device.host import data_changed
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box, Shard, TensorLayout, elements_overlap

# Steps by which a view can show one element several times.
_REPEATING = tuple(
    getattr(torch._C._functionalization, f"{name}_ViewMeta") for name in ("expand", "unfold", "as_strided")
)
_TILES = re.compile(r"devices=\[([\d,]+)\]")

HOST_SHARE = 0.75
"""Share of the host's available memory that copies on virtual devices may take. The rest is for the save's buffers."""

_LEAST_KEPT = 1 << 20
"""Bytes, all devices together: smaller copies are cheap to allocate, and overwriting them takes longer to compile."""

_CHOSEN_EXACTLY = frozenset(
    (
        *(torch.float32, torch.float64, torch.complex64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )
)
"""Types whose every bit survives ``torch.where`` on CPU devices, which compute others in a wider type: NaNs change."""


class XlaAccess:
    """``TensorAccess`` for XLA tensors, sharded by SPMD or not."""

    def settle(self) -> None:
        compute_pending()
        xm.wait_device_ops()

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        """The live tensor's layout: what the compiler made of it, not what the program marked."""
        tensor = _unwrapped(tensor)
        spec = _XLAC._get_xla_sharding_spec(tensor)
        devices = self.devices()
        if _tiled(spec):
            ((*pieces,),) = _XLAC._get_local_shard_replica_and_indices([tensor])
            places = zip(devices, pieces, strict=True)
            shards = tuple(Shard(_box(index, tensor.shape), device, n) for device, (n, index) in places)
            shard_shape = tuple(-(-n // tiles) for n, tiles in zip(tensor.shape, _tiles(spec)))
        else:
            whole = Box.whole(tensor.shape)
            shards = tuple(Shard(whole, device, n) for n, device in enumerate(devices))
            shard_shape = whole.sizes
        return TensorLayout(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            shards=shards,
            shard_shape=shard_shape,
            sharding=spec or "unmarked",
            # Without SPMD every process computes on its own, and replicas are only meant to agree.
            identical=xr.is_spmd(),
        )

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        tensor = _unwrapped(tensor)
        if layout.dtype == torch.complex128:
            return self._fetch_complex128(tensor, layout)
        if not _tiled(_XLAC._get_xla_sharding_spec(tensor)):
            (full,) = _XLAC._xla_get_cpu_tensors([tensor])
            return {layout.shards[0].box: full}
        (pieces,) = _XLAC._get_local_shards([tensor])
        # Shards of unsigned tensors come back as the signed type of the same size: the bits are right.
        data = {device: piece.view(layout.dtype) for piece, device in pieces}
        boxes = {shard.box: data[shard.device] for shard in reversed(layout.shards)}
        return {box: piece[tuple(slice(n) for n in box.sizes)] for box, piece in boxes.items()}

    def _fetch_complex128(self, tensor: torch.Tensor, layout: TensorLayout) -> Mapping[Box, torch.Tensor]:
        """The runtime drops the imaginary part of complex128 on the way to the host: fetch the two parts apart."""
        parts = [tensor.real.clone(), tensor.imag.clone()]
        if _tiled(_XLAC._get_xla_sharding_spec(tensor)):
            for part in parts:
                _XLAC._xla_mark_sharding(part, _XLAC._get_xla_op_sharding(tensor))
        self.settle()
        real, imag = (self.fetch(part, replace(layout, dtype=torch.float64)) for part in parts)
        return {box: torch.complex(real[box], imag[box]) for box in real}

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        return layout.nbytes

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        if isinstance(tensor, XLAShardedTensor):
            data_changed(tensor)
        tensor = _unwrapped(tensor)
        if not _tiled(_XLAC._get_xla_sharding_spec(tensor)):
            data = shards[layout.shards[0].box]
            if data.ndim == 0:
                # Copied from the host, a 0-d tensor becomes a constant of the graph, and there are no float8 ones.
                (data,) = _XLAC._xla_tensors_from_aten([data], [str(tensor.device)], [None])
            with torch.no_grad():
                tensor.detach().copy_(data)
            return
        if tensor._is_view():
            # New shards for a view would leave its base behind: give them to a tensor of its own, and copy that.
            fresh = torch.zeros_like(tensor)
            _XLAC._xla_mark_sharding(fresh, _XLAC._get_xla_op_sharding(tensor))
            self.settle()
            self.put(fresh, layout, shards)
            with torch.no_grad():
                tensor.copy_(fresh)
            return
        # A device whose shard is all padding still wants a tensor to hold.
        hollow = {shard.box for shard in layout.shards if not shard.box.volume}
        padding = {box: torch.zeros(layout.shard_shape, dtype=layout.dtype) for box in hollow}
        parts = [padding[shard.box] if shard.box in hollow else shards[shard.box] for shard in layout.shards]
        _XLAC._load_local_shards(tensor, parts, [shard.device for shard in layout.shards])
        _data_changed(tensor)

    def devices(self) -> list[str]:
        """Names of this process's devices, in the order in which the runtime lists shards."""
        return _XLAC._xla_get_runtime_devices()


def _data_changed(tensor: torch.Tensor) -> None:
    """Tell views and autograd that a tensor has new shards, as ``copy_`` does."""
    if torch._is_functional_tensor(tensor):
        torch._functionalize_commit_update(tensor)  # views are computed again from the new data when they are used
    data_changed(tensor)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether one element of what a view was made of stands for several elements of the view.

    XLA tensors have the strides of contiguous ones, whatever they view. What a view was made by tells: where its base
    is known, by the strides that the same view of an ordinary tensor has; otherwise ``expand`` and its kin are
    refused.
    """
    tensor = _unwrapped(tensor)
    if not torch._is_functional_tensor(tensor) or tensor.numel() < 2:
        return False
    steps = torch._C._functionalization.get_view_meta_sequence(tensor)
    if not any(isinstance(step, _REPEATING) for step in steps):
        return False
    base = tensor._base if tensor._is_view() else None
    if base is None:
        return True
    replayed = tensor._view_func_unsafe(torch.empty(base.shape, dtype=base.dtype, device="meta"))
    return elements_overlap(tuple(replayed.shape), replayed.stride())


def alias_of(tensor: torch.Tensor) -> tuple[str, int]:
    """An identity that a tensor shares with its ``detach()`` and ``data``, not with its views."""
    return "xla", _XLAC._xla_get_tensor_id(_unwrapped(tensor))


def compute_pending() -> None:
    """Start what the program has traced, as the step's own sync would.

    That sync also moves the devices' seed, which cannot be put back while numbers that were drawn are pending.
    """
    _XLAC._xla_sync_live_tensors("", [], False)


def seed() -> int:
    """The devices' seed."""
    return int(xm.get_rng_state())


def set_seed(value: int) -> None:
    xm.set_rng_state(value)


def preemption_notice() -> Callable[[int], bool] | None:
    """torch_xla's preemption sync: whether all hosts stop at a step. None where the platform has none.

    It lets those agree that the runtime knows as hosts of one program. Elsewhere than on TPUs every process is one of
    its own to the runtime, and would only agree with itself.
    """
    if xr.device_type() != "TPU":
        return None
    _XLAC._ensure_xla_coordinator_initialized(xr.process_index(), xr.process_count(), xr.get_master_ip())
    _XLAC._activate_preemption_sync_manager()
    return lambda step: bool(_XLAC._sync_point_reached(step))


@contextmanager
def same_seed() -> Iterator[None]:
    """Put the devices' seed back: training must draw the numbers it would have drawn without a checkpoint."""
    before = seed()
    try:
        yield
    finally:
        set_seed(before)


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor, copied on the devices.

    Args:
        data: the copy.
        dim: along which the tensor was cut. None: it is whole.
        start: of the piece, within each tile if ``tile`` is given.
        tile: length of a tile along ``dim``, which has become two dimensions: which tile, and where in it.
    """

    data: torch.Tensor
    dim: int | None = None
    start: int = 0
    tile: int | None = None

    def places(self, box: Box) -> Iterator[tuple[Box, tuple[Any, ...]]]:
        """The boxes of the tensor that a box of the piece stands for, and how to index its data for each."""
        d, whole = self.dim, (slice(None),) * len(box.sizes)
        if d is None:
            yield box, whole
        elif self.tile is None:
            yield _moved(box, d, self.start), whole
        else:
            for n in range(box.sizes[d]):
                first = (box.offsets[d] + n) * self.tile + self.start + box.offsets[d + 1]
                offsets = (*box.offsets[:d], first, *box.offsets[d + 2 :])
                sizes = (*box.sizes[:d], *box.sizes[d + 1 :])
                yield Box(offsets, sizes), (*whole[:d], n)


class DeviceCopy:
    """The ``SnapshotData`` of one tensor, on the devices that hold the tensor; in pieces if it is large."""

    def __init__(self, like: torch.Tensor, pieces: Sequence[_Piece], access: XlaAccess, settled: Callable[[], None]):
        self._shape = tuple(like.shape)
        self._dtype = like.dtype
        self._sharding = _XLAC._get_xla_sharding_spec(like) or "unmarked"
        self._pieces = pieces
        self._access = access
        self._settled = settled

    @cached_property
    def _layouts(self) -> list[TensorLayout]:
        self._settled()
        return [self._access.layout(piece.data) for piece in self._pieces]

    def layout(self) -> TensorLayout:
        shards = tuple(
            Shard(box, shard.device, shard.replica, part)
            for part, (piece, layout) in enumerate(zip(self._pieces, self._layouts))
            for shard in layout.shards
            for box, _ in piece.places(shard.box)
        )
        return TensorLayout(self._shape, self._dtype, shards, self._shape, self._sharding, identical=xr.is_spmd())

    def fetch(self, part: int) -> Mapping[Box, torch.Tensor]:
        piece = self._pieces[part]
        data = self._access.fetch(piece.data, self._layouts[part])
        return {place: shard[index] for box, shard in data.items() for place, index in piece.places(box)}

    def host_bytes(self, part: int) -> int:
        return self._access.host_bytes(self._pieces[part].data, self._layouts[part])


class _Like(NamedTuple):
    """What two parts of tensors must share so that a copy of one can be overwritten with the other.

    Args:
        shape, dtype: of the part.
        sharding: of the tensor that it is a part of.
        cut: dimension, start and tile length of the part; see ``_Piece``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: str
    cut: tuple[int | None, int, int | None]


class KeptCopies:
    """Device memory of earlier copies, which the next copy overwrites.

    For virtual devices only. Their memory is host memory, which costs a page fault every 4 KiB when it is new, and
    again after it was freed. An accelerator's allocator keeps its memory anyway, and training needs it between saves.

    A copy's memory comes back when nobody holds the copy any more. What is kept is never more than the last copy.
    """

    def __init__(self) -> None:
        self._free: dict[_Like, list[torch.Tensor]] = {}
        self._wanted: Counter[_Like] = Counter()
        self._yes: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on each device that are kept and not in use."""
        return sum(copied_bytes(tensor) for tensors in list(self._free.values()) for tensor in list(tensors))

    def drop(self) -> None:
        """Free what is kept, and do not keep the copies that are still in use."""
        self._free, self._wanted = {}, Counter()

    def copies(self, parts: Sequence[_Part]) -> list[torch.Tensor]:
        """Trace a copy of each part: of all large ones in kept memory, or of none, so that only two graphs exist."""
        self._wanted = wanted = Counter(part.like for part in parts if part.large)
        free, self._free = self._free, {}
        if any(len(free.get(like, ())) < number for like, number in wanted.items()):
            return [part.clone() for part in parts]
        # Kept copies that are not overwritten are freed here: the allocator gives out their memory for the new copies.
        reused = [part.large and part.data.dtype in _CHOSEN_EXACTLY for part in parts]
        return [
            self._overwritten(free[part.like].pop(), part.data) if reuse else part.clone()
            for part, reuse in zip(parts, reused)
        ]

    def give_back(self, pieces: Iterable[tuple[_Like, torch.Tensor]]) -> None:
        """Keep copies that nobody holds any more. Called in any thread, between any two instructions of another."""
        for like, tensor in pieces:
            tensors = self._free.setdefault(like, [])
            if len(tensors) < self._wanted[like]:
                tensors.append(tensor)

    def _overwritten(self, copy: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """``copy`` with new data in its old memory.

        The runtime reuses the memory of a tensor that is updated in place only if the graph reads the tensor. A choice
        between old and new data does, and the compiler does not know that it always falls on the new.
        """
        if self._yes is None:  # as a parameter of the graph; copied in the usual way, it would be a constant
            (self._yes,) = _XLAC._xla_tensors_from_aten([torch.tensor(True)], [str(data.device)], [None])
        return copy.copy_(torch.where(self._yes, data, copy))


def keeps_copies() -> bool:
    """Whether devices are virtual ones in host memory, whose copies are worth keeping."""
    return xr.device_type() == "CPU"


def copy_on_devices(
    tensors: Sequence[torch.Tensor], access: XlaAccess, part_bytes: int, kept: KeptCopies | None = None
) -> list[DeviceCopy]:
    """Copy tensors on their devices, without waiting for it.

    What the program has not synced yet is synced first, so that the step's graph is the one it always is. The copies
    are a graph of their own, and leave the devices' seed alone.

    Args:
        tensors: not of complex128, which cannot be fetched without another graph.
        access: how copies are read.
        part_bytes: how much of a tensor is fetched at a time. Where a tensor's shards on this process together are
            larger, it is copied in pieces, if it can be cut without moving data between devices.
        kept: memory of earlier copies to use, and to give these copies' memory back to. Default: new memory.
    """
    compute_pending()
    with torch.no_grad():
        parts = [list(_parts(_unwrapped(tensor).detach(), part_bytes)) for tensor in tensors]
        flat = [part for several in parts for part in several]
        data = [part.clone() for part in flat] if kept is None else kept.copies(flat)
    # Only these: a full sync would move the seed, and reset what the program traces.
    _XLAC._xla_sync_multi(data, [], wait=False)
    settled = lru_cache(_wait)
    left = iter(data)
    copies = []
    for tensor, several in zip(tensors, parts):
        pieces = [_Piece(next(left), *part.like.cut) for part in several]
        copies.append(DeviceCopy(_unwrapped(tensor), pieces, access, settled))
        if kept is not None:
            owned = [(part.like, piece.data) for part, piece in zip(several, pieces)]
            weakref.finalize(copies[-1], kept.give_back, owned).atexit = False
    return copies


def can_be_copied(tensor: torch.Tensor) -> bool:
    """Whether a copy on the devices could be fetched without computing anything, and is worth it."""
    return tensor.dtype != torch.complex128 and tensor.numel() > 0


def copied_bytes(tensor: torch.Tensor) -> int:
    """What a copy of the tensor takes on each device, in bytes."""
    tensor = _unwrapped(tensor)
    spec = _XLAC._get_xla_sharding_spec(tensor)
    tiles = _tiles(spec)[: tensor.ndim] if _tiled(spec) else [1] * tensor.ndim
    return math.prod(-(-n // t) for n, t in zip(tensor.shape, tiles)) * tensor.itemsize


def memory_left() -> int | None:
    """Return the bytes that a copy may take on each device; None where that is not known.

    What has never been in use on the device that has had most in use. Virtual devices report nothing, but live in host
    memory: they share three quarters of what this host has available.
    """
    try:
        info = xm.get_memory_info()
    except (RuntimeError, ValueError):  # under SPMD torch_xla 2.9 does not tell
        return _host_memory_left() if xr.device_type() == "CPU" else None
    return info["bytes_limit"] - info.get("peak_bytes_used", info["bytes_used"])


def _host_memory_left() -> int | None:
    free = memory.available()
    return None if free is None else int(free * HOST_SHARE) // len(_XLAC._xla_get_runtime_devices())


def _wait() -> None:
    xm.wait_device_ops()


class _Part(NamedTuple):
    """A part of a tensor that is to be copied.

    Args:
        data: the part, traced.
        like: which copies it can overwrite.
        sharding: to mark its copy with; None leaves that to the compiler.
    """

    data: torch.Tensor
    like: _Like
    sharding: Any = None

    @property
    def large(self) -> bool:
        """Whether the memory of a copy is worth keeping."""
        return self.data.nbytes >= _LEAST_KEPT

    def clone(self) -> torch.Tensor:
        """A copy in new memory."""
        copy = self.data.clone()
        if self.sharding is not None:
            _XLAC._xla_mark_sharding(copy, self.sharding)
        return copy


def _parts(tensor: torch.Tensor, part_bytes: int) -> Iterator[_Part]:
    """Cut a tensor; together the parts are all of it."""
    spec = _XLAC._get_xla_sharding_spec(tensor)
    cut = _tiled(spec)
    local = copied_bytes(tensor) * (len(_XLAC._xla_get_runtime_devices()) if cut else 1)
    wanted = -(-local // part_bytes)
    tiles = _tiles(spec)[: tensor.ndim] if cut else [1] * tensor.ndim
    # Length of the tiles along each dimension that can be cut: its tiles must be alike.
    lengths = {d: n // t for d, (n, t) in enumerate(zip(tensor.shape, tiles)) if n % t == 0 and n > t}
    if wanted <= 1 or not lengths:
        yield _Part(tensor, _Like(tuple(tensor.shape), tensor.dtype, spec, (None, 0, None)))
        return
    # The first dimension if it will do, because then the pieces' data lies together.
    dim = next((d for d, length in lengths.items() if length >= wanted), max(lengths, key=lambda d: lengths[d]))
    length, folded = lengths[dim], tiles[dim] > 1
    step = -(-length // wanted)
    sharding = _XLAC._get_xla_op_sharding(tensor) if cut and not folded else None
    if folded:
        tensor = tensor.reshape(*tensor.shape[:dim], tiles[dim], length, *tensor.shape[dim + 1 :])
    for start in range(0, length, step):
        data = tensor.narrow(dim + folded, start, min(step, length - start))
        where = (dim, start, length if folded else None)
        yield _Part(data, _Like(tuple(data.shape), tensor.dtype, spec, where), sharding)


def _moved(box: Box, dim: int, by: int) -> Box:
    return Box((*box.offsets[:dim], box.offsets[dim] + by, *box.offsets[dim + 1 :]), box.sizes)


def make(shape: torch.Size, dtype: torch.dtype, op_sharding: Any) -> torch.Tensor:
    """A new tensor of zeros, sharded; nothing is computed before the next sync, and then each device's shard only."""
    tensor = torch.zeros(shape, dtype=dtype, device="xla")
    if op_sharding is not None:
        _XLAC._xla_mark_sharding(tensor, op_sharding)
    return tensor


def op_sharding(mesh: Any, spec: Sequence[Any], shape: torch.Size) -> Any:
    """The runtime's sharding for a partition spec.

    Raises:
        ValueError: it does not fit the mesh or the shape.
    """
    require_spec(mesh, spec, shape)
    if not shape.numel() or all(axis is None for axis in spec):
        return None
    return mesh.get_op_sharding(tuple(spec))


def require_spec(mesh: Any, spec: Sequence[Any], shape: Sequence[int]) -> None:
    """Show that a partition spec fits a mesh and a tensor.

    Raises:
        ValueError: it does not.
    """
    names = mesh.axis_names or ()
    if len(spec) != len(shape):
        raise ValueError(f"the partition spec {tuple(spec)} has {len(spec)} entries for {len(shape)} dimensions")
    axes = [axis for entry in spec if entry is not None for axis in (entry if isinstance(entry, tuple) else (entry,))]
    for axis in axes:
        known = axis in names if isinstance(axis, str) else 0 <= axis < len(mesh.mesh_shape)
        if not known:
            raise ValueError(f"the mesh has no axis {axis!r}; it has {names or len(mesh.mesh_shape)}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"the partition spec {tuple(spec)} uses an axis of the mesh twice")


def mark(tensor: torch.Tensor, mesh: Any, spec: Sequence[Any]) -> None:
    """Shard a tensor on devices that is whole on each of them."""
    sharding = op_sharding(mesh, spec, tensor.shape)
    if sharding is not None:
        forget_replication(tensor)
        _XLAC._xla_mark_sharding(tensor, sharding)


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether the devices hold different parts of a tensor."""
    return tensor.device.type == "xla" and _tiled(_XLAC._get_xla_sharding_spec(_unwrapped(tensor)))


def forget_replication(tensor: torch.Tensor) -> None:
    """Let a tensor that the compiler has replicated be marked."""
    if _XLAC._get_xla_sharding_spec(tensor):
        _XLAC._xla_clear_sharding(tensor)


def op_sharding_of(tensor: torch.Tensor) -> Any:
    """The runtime's sharding of a tensor, if it is cut."""
    tensor = _unwrapped(tensor)
    return _XLAC._get_xla_op_sharding(tensor) if _tiled(_XLAC._get_xla_sharding_spec(tensor)) else None


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.global_tensor if isinstance(tensor, XLAShardedTensor) else tensor


def _tiled(spec: str) -> bool:
    """Whether the runtime keeps shards apart; "" (never marked) and "{replicated}" are whole on every device."""
    if not spec or spec == "{replicated}":
        return False
    if _TILES.search(spec) and "manual" not in spec:
        return True
    raise CheckpointError(f"a tensor with the sharding {spec} has no boxes to save. Give it a tiled or replicated one")


def _tiles(spec: str) -> list[int]:
    """Number of tiles in each dimension; further numbers count replicas."""
    match = _TILES.search(spec)
    assert match is not None, spec
    return [int(n) for n in match[1].split(",")]


def _box(index: Any, shape: torch.Size) -> Box:
    """The box of a shard from the runtime's slices; an Ellipsis stands for the whole tensor."""
    if index is Ellipsis:
        return Box.whole(shape)
    return Box(tuple(part.start for part in index), tuple(part.stop - part.start for part in index))

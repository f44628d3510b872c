"""Copies of state dicts that later changes of the state cannot reach."""

from __future__ import annotations

import datetime
import decimal
import io
import logging
import pathlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from torch_xla_ckpt.device import HostCopy, Snapshot, lazy
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.protocols import TensorAccess
from torch_xla_ckpt.reports import Timeline
from torch_xla_ckpt.serialization import Encoded, encode
from torch_xla_ckpt.state import (
    Buffers,
    Leaf,
    TensorHandle,
    fetched,
    flatten,
    gathered,
    key_of,
    lay_out,
    mapped,
    require_savable,
)

logger = logging.getLogger(__name__)

Mode = Literal["auto", "device", "host"]

_IMMUTABLE = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...)),
        *(torch.dtype, torch.device, torch.Size),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID),
        *(pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath, pathlib.WindowsPath),
    )
)


class Choice(NamedTuple):
    """How the tensors of a state were copied, and why.

    Args:
        mode: "device" or "host". In mode "device", some tensors may have been copied to the host.
        reason: the reason for the mode, in words.
    """

    mode: Literal["device", "host"]
    reason: str


class Captured(NamedTuple):
    """A copy of a state dict.

    Args:
        state: containers like those of the state dict, with a ``Snapshot`` in place of each tensor and an ``Encoded``
            in place of each mutable object.
        snapshots: the snapshots in ``state``.
        choice: how tensors on devices were copied.
    """

    state: dict[Any, Any]
    snapshots: Sequence[Snapshot]
    choice: Choice


class Capture:
    """Copies state dicts.

    Args: see ``SPMDStager``.
    """

    def __init__(
        self,
        mode: Mode,
        device_memory_limit: int | None,
        part_bytes: int,
        reuse_buffers: bool,
        access: Callable[[torch.Tensor], TensorAccess],
    ):
        self._mode = mode
        self._limit = device_memory_limit
        self._part_bytes = part_bytes
        self._reuse_buffers = reuse_buffers
        self._buffers = Buffers()
        self._fetched: dict[str, Mapping[Box, torch.Tensor]] = {}
        self._kept: lazy.xla.KeptCopies | None = None
        self._access_of = access

    def take(self, state_dict: Mapping[Any, Any], check: Callable[[], None], timeline: Timeline) -> Captured:
        """Copy a state dict.

        Args:
            state_dict: nested mappings, lists, tensors and objects.
            check: a function that the copies call before each use; it may raise.
            timeline: records what is copied when.

        Raises:
            CheckpointError: a value cannot be saved or copied. The message names its key.
        """
        leaves = flatten(state_dict)
        tensors = {key: leaf.value for key, leaf in leaves.items() if leaf.is_tensor}
        require_savable(tensors)
        on_devices = {key: t for key, t in tensors.items() if t.device.type == "xla"}
        choice, copied = self._choose(on_devices)
        if self._kept is not None and not copied:
            self._kept.drop()
        snapshots: dict[str, Snapshot] = {}
        if copied:
            with timeline.span("copy on devices"):
                snapshots.update(self._on_devices(copied, check))
        through_host = {key: t for key, t in tensors.items() if key not in copied}
        self._fetched = {key: shards for key, shards in self._fetched.items() if key in through_host}
        with timeline.span("copy to host"):
            for key, held in lay_out(through_host, self._access_of).items():
                snapshots[key] = Snapshot(held.tensor, self._host_copy(key, held), check)

        def change(leaf: Leaf) -> Any:
            key = key_of(leaf.path)
            if leaf.is_tensor:
                return snapshots[key]
            if _is_immutable(leaf.value) and snapshots:
                return leaf.value
            return Encoded(self._encoded(key, leaf.value), check)  # in a state without tensors, objects must check

        with timeline.span("copy objects"):
            state = mapped(state_dict, change)
        return Captured(state, tuple(snapshots.values()), choice)

    def release(self) -> None:
        """Free the memory that is kept for the next copy."""
        self._buffers = Buffers()
        self._fetched = {}
        self._kept = None  # copies that are still in use hold the old object, and their memory is freed with it

    def _choose(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Choice, dict[str, torch.Tensor]]:
        """Choose the mode, and return the tensors to copy on their devices.

        Args:
            tensors: the tensors on XLA devices, by key.
        """
        if self._mode == "host":
            return Choice("host", "mode='host'"), {}
        if not tensors:
            return Choice("host", "nothing in the state lies on XLA devices"), {}
        sizes = {key: lazy.xla.copied_bytes(t) for key, t in tensors.items() if lazy.xla.can_be_copied(t)}
        total = sum(sizes.values())
        if self._mode == "auto":
            room = self._limit if self._limit is not None else self._room()
            if room is None:
                _warn_once(total)
                reason = "the device does not report its free memory, and device_memory_limit= was not set"
                return Choice("host", reason), {}
            source = "device_memory_limit is" if self._limit is not None else "the device has free"
            reason = f"a copy takes {total:,} bytes on each device, and {source} {room:,}"
            if total > room:
                return Choice("host", reason), {}
            return Choice("device", reason), {key: tensors[key] for key in sizes}
        if self._limit is None or total <= self._limit:
            return Choice("device", "mode='device'"), {key: tensors[key] for key in sizes}
        left, chosen = self._limit, []
        for key in sorted(sizes, key=lambda key: -sizes[key]):  # a few large tensors make the smallest graph
            if sizes[key] <= left:
                left -= sizes[key]
                chosen.append(key)
        reason = (
            f"mode='device' within {self._limit:,} bytes: of {total:,} on each device, {self._limit - left:,} were "
            "copied there, and the rest went through the host"
        )
        return Choice("device", reason), {key: tensors[key] for key in chosen}

    def _room(self) -> int | None:
        """Return the bytes that a copy may take on each device: free memory, and memory kept from the last copy.

        None if the device does not report its free memory.
        """
        free = lazy.xla.memory_left()
        return free if free is None or self._kept is None else free + self._kept.nbytes

    def _on_devices(self, tensors: Mapping[str, torch.Tensor], check: Callable[[], None]) -> dict[str, Snapshot]:
        access = self._access_of(next(iter(tensors.values())))  # all XLA tensors have one access
        assert isinstance(access, lazy.xla.XlaAccess)
        if self._kept is None and self._reuse_buffers and lazy.xla.keeps_copies():
            self._kept = lazy.xla.KeptCopies()
        try:
            copies = lazy.xla.copy_on_devices(list(tensors.values()), access, self._part_bytes, self._kept)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the state could not be copied on its devices: {len(tensors)} tensors, such as {next(iter(tensors))!r}"
                f" ({type(error).__name__}: {error}). If the devices are short of memory, pass mode='host' or "
                "device_memory_limit= to the stager"
            ) from error
        return {key: Snapshot(t, copy, check) for (key, t), copy in zip(tensors.items(), copies)}

    def _host_copy(self, key: str, held: TensorHandle) -> HostCopy:
        if held.tensor.device.type == "cpu":
            return HostCopy(held.layout, {box: self._copy(key, data) for box, data in fetched(key, held).items()})
        # Free the last copy's shards of this tensor just before the runtime allocates as much memory again. The
        # allocator then returns the same memory, and no second copy into a kept buffer is needed.
        self._fetched.pop(key, None)
        shards = fetched(key, held)
        if self._reuse_buffers:
            self._fetched[key] = shards
        return HostCopy(held.layout, shards)

    def _copy(self, key: str, data: torch.Tensor) -> torch.Tensor:
        bits = data.view(torch.uint8) if data.itemsize == 1 else data  # torch cannot copy float4_e2m1fn_x2
        try:
            if self._reuse_buffers:
                return self._buffers.empty(bits.shape, bits.dtype).copy_(bits).view(data.dtype)
            return bits.clone(memory_format=torch.contiguous_format).view(data.dtype)
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"{key!r}: no copy of {data.numel() * data.itemsize:,} bytes could be made in host memory "
                f"({type(error).__name__}: {error}). If memory is short, save with torch_xla_ckpt.save, which makes no "
                "copy, or leave the tensor out"
            ) from error

    def _encoded(self, key: str, value: Any) -> io.BytesIO:
        return encode(key, value, lambda tensor: gathered(tensor, self._access_of))


_warned = False


def _warn_once(nbytes: int) -> None:
    """Warn, once in a process, that mode "auto" copies to the host, and name the option that changes this.

    Args:
        nbytes: bytes that a copy takes on each device.
    """
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "SPMDStager copies this state through host memory, so each call blocks training until all of it has been "
            "fetched: the devices do not report their free memory. A copy takes %s bytes on each device and blocks "
            "training for milliseconds. If so much is free, pass SPMDStager(device_memory_limit=...) with at least as "
            'many bytes. Pass mode="host" to keep copying through host memory without this warning',
            f"{nbytes:,}",
        )


def _is_immutable(value: Any) -> bool:
    """Whether nothing can change ``value`` in place."""
    waiting, seen = [value], {id(value)}
    while waiting:  # not a recursion, because tuples may be nested deeper than Python's recursion limit
        one = waiting.pop()
        if type(one) in (tuple, frozenset):
            waiting += [inner for inner in one if id(inner) not in seen]
            seen.update(map(id, one))
        elif type(one) not in _IMMUTABLE:
            return False
    return True

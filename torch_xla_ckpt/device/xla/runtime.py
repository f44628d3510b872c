"""The XLA runtime: pending computation, the random seed, free memory, and preemption notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla import _XLAC

from torch_xla_ckpt.device import memory

_HOST_SHARE = 0.75
"""Share of the host's available memory that copies on virtual devices may take. The save's buffers need the rest."""


def use_spmd() -> None:
    """Switch the runtime to SPMD, unless it is there already. Tensors that exist by then are replicated."""
    if not xr.is_spmd():
        xr.use_spmd()


def device_count() -> int:
    """Return the number of devices of all processes. This starts the runtime."""
    return int(xr.global_runtime_device_count())


def root_device() -> torch.device:
    """Return the device of this process's XLA tensors, which stands for all devices under SPMD."""
    return torch_xla.device()


def step() -> None:
    """Start the computation that the program has traced, as ``torch_xla.sync()`` does at the end of a training step."""
    torch_xla.sync()


def compute_pending() -> None:
    """Start the computation that the program has traced, with the same graph as the training step's own sync.

    ``torch_xla.sync()`` would also change the devices' seed, which cannot be reset while drawn numbers are pending.
    """
    _XLAC._xla_sync_live_tensors("", [], False)


def await_devices() -> None:
    """Wait until the devices have computed everything that was started."""
    xm.wait_device_ops()


def are_devices_virtual() -> bool:
    """Whether the devices are virtual ones, whose memory is host memory."""
    return xr.device_type() == "CPU"


def seed() -> int:
    """Return the random seed of the devices."""
    return int(xm.get_rng_state())


def set_seed(value: int) -> None:
    """Set the random seed of the devices."""
    xm.set_rng_state(value)


@contextmanager
def same_seed() -> Iterator[None]:
    """Reset the devices' seed after the block, so that training draws the same numbers with and without a load."""
    before = seed()
    try:
        yield
    finally:
        set_seed(before)


def memory_left() -> int | None:
    """Return the bytes that a copy may take on each device; None if they are not known.

    Estimated from the peak use of the device that reports most use. Virtual devices report nothing. Together they may
    take three quarters of the host's available memory.
    """
    try:
        info = xm.get_memory_info()
    except (RuntimeError, ValueError):  # under SPMD, torch_xla 2.9 cannot tell
        return _host_memory_left() if are_devices_virtual() else None
    return info["bytes_limit"] - info.get("peak_bytes_used", info["bytes_used"])


def _host_memory_left() -> int | None:
    free = memory.available()
    return None if free is None else int(free * _HOST_SHARE) // len(_XLAC._xla_get_runtime_devices())


def preemption_notice() -> Callable[[int], bool] | None:
    """Return torch_xla's preemption sync: whether all hosts stop at a step. None if the platform has none.

    Only hosts that the runtime knows as one program can agree on a step. That is so on TPUs. On other platforms, every
    process is a program of its own to the runtime.
    """
    if xr.device_type() != "TPU":
        return None
    _XLAC._ensure_xla_coordinator_initialized(xr.process_index(), xr.process_count(), xr.get_master_ip())
    _XLAC._activate_preemption_sync_manager()
    return lambda step: bool(_XLAC._sync_point_reached(step))

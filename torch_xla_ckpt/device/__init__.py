"""Access to the data of tensors on every kind of device.

``protocols.TensorAccess`` is the interface. ``host`` implements it for tensors in host memory, for DTensors, and for
any device that plain torch can copy from; ``xla`` for tensors on XLA devices; ``snapshot`` for copies of both. Only
``device/xla/`` may import torch_xla. It is imported at the first XLA tensor, so everything else works without it.
"""

from torch_xla_ckpt.device import lazy
from torch_xla_ckpt.device.access import (
    Placement,
    access_of,
    alias_of,
    data_changed,
    make,
    require_kind,
    require_place,
    require_target,
)
from torch_xla_ckpt.device.snapshot import HostCopy, Snapshot

__all__ = [
    "HostCopy",
    "Placement",
    "Snapshot",
    "access_of",
    "alias_of",
    "data_changed",
    "lazy",
    "make",
    "require_kind",
    "require_place",
    "require_target",
]

"""How tensors are read from and written to where they live.

``protocols.TensorAccess`` is the interface; ``host`` implements it for tensors in host memory (and DTensors, and any
device that plain torch can copy from), ``xla`` for tensors on XLA devices, ``snapshot`` for copies of either. Only
``device/xla.py`` may import torch_xla, and it is imported when the first XLA tensor is met, so everything else works
without torch_xla.
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

"""How tensors are read from and written to where they live.

``TensorAccess`` is the one interface; ``host`` implements it for tensors in host memory (and DTensors, and any
device that plain torch can copy from), ``xla`` for tensors on XLA devices, ``snapshot`` for copies of either. Only
``device/xla.py`` may import torch_xla, and it is imported when the first XLA tensor is met, so everything else works
without torch_xla.
"""

from torch_xla_ckpt.device.access import (
    Placement,
    TensorAccess,
    access_of,
    alias_of,
    data_changed,
    make,
    require_kind,
    require_place,
    require_target,
)
from torch_xla_ckpt.device.snapshot import Copy, HostCopy, Snapshot

__all__ = [
    "Copy",
    "HostCopy",
    "Placement",
    "Snapshot",
    "TensorAccess",
    "access_of",
    "alias_of",
    "data_changed",
    "make",
    "require_kind",
    "require_place",
    "require_target",
]

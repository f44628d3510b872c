"""Tensors on XLA devices. Only this folder imports torch_xla, and only this folder uses torch_xla's private names.

``access`` reads and writes shards, ``sharding`` knows sharding specs and marks, ``copies`` makes snapshots on the
devices, and ``runtime`` talks to the runtime about anything that is not a tensor.
"""

try:
    import torch_xla  # noqa: F401  shows whether it is installed
except ImportError as error:
    raise ImportError(
        "torch_xla is not installed, and this operation handles tensors on XLA devices. Install a torch_xla that fits "
        "torch: pip install 'torch_xla_ckpt[xla]'"
    ) from error

from torch_xla_ckpt.device.xla.access import XlaAccess, alias_of, overlaps_itself
from torch_xla_ckpt.device.xla.copies import (
    DeviceCopy,
    KeptCopies,
    can_be_copied,
    copied_bytes,
    copy_on_devices,
    keeps_copies,
)
from torch_xla_ckpt.device.xla.runtime import (
    compute_pending,
    device_count,
    memory_left,
    preemption_notice,
    root_device,
    same_seed,
    seed,
    set_seed,
    step,
    use_spmd,
)
from torch_xla_ckpt.device.xla.sharding import (
    forget_replication,
    is_cut,
    make,
    mark,
    new_mesh,
    op_sharding,
    op_sharding_of,
    require_spec,
    upload,
)

__all__ = [
    "DeviceCopy",
    "KeptCopies",
    "XlaAccess",
    "alias_of",
    "can_be_copied",
    "compute_pending",
    "copied_bytes",
    "copy_on_devices",
    "device_count",
    "forget_replication",
    "is_cut",
    "keeps_copies",
    "make",
    "mark",
    "memory_left",
    "new_mesh",
    "op_sharding",
    "op_sharding_of",
    "overlaps_itself",
    "preemption_notice",
    "require_spec",
    "root_device",
    "same_seed",
    "seed",
    "set_seed",
    "step",
    "upload",
    "use_spmd",
]

"""Restoring models and optimizers, in whatever state of being built they are.

Planning comes first: which keys fit, where tensors go, and which values modules compute themselves. Only a restore
whose plan holds changes the model and the optimizer. Bytes and files are the business of ``planner`` and ``storage``.
"""

from torch_xla_ckpt.restoring.initialize import HeldTensor
from torch_xla_ckpt.restoring.materialize import Sharding, held_tensors
from torch_xla_ckpt.restoring.named import require_restorable
from torch_xla_ckpt.restoring.placing import Placement, fill
from torch_xla_ckpt.restoring.priming import prime_optimizer, sharded_state
from torch_xla_ckpt.restoring.restore import OPTIONS, restore

__all__ = [
    "OPTIONS",
    "HeldTensor",
    "Placement",
    "Sharding",
    "fill",
    "held_tensors",
    "prime_optimizer",
    "require_restorable",
    "restore",
    "sharded_state",
]

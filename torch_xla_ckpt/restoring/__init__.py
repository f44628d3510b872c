"""TODO"""

from torch_xla_ckpt.restoring.materialize import Sharding
from torch_xla_ckpt.restoring.restore import prime_optimizer, restore

__all__ = [
    "Sharding",
    "prime_optimizer",
    "restore",
]

"""TODO"""

from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.runtime.collector import without_collector

__all__ = [
    "forks",
    "without_collector",
]

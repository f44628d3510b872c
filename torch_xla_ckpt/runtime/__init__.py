"""What the whole package needs from Python itself: forked processes and the garbage collector.

``forks`` tells objects of this process from objects of the process that it was forked from. This room imports no other
room.
"""

from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.runtime.collector import without_collector

__all__ = [
    "forks",
    "without_collector",
]

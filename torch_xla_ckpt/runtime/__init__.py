"""What the whole package needs from Python itself: forked processes, the garbage collector, lazy properties.

``forks`` tells objects of this process from objects of the process that it was forked from. This room imports no other
room.
"""

from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.runtime.collector import without_collector
from torch_xla_ckpt.runtime.lazy import lazy_property

__all__ = [
    "forks",
    "lazy_property",
    "without_collector",
]

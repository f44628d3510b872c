"""Geometry of sharded tensors, on integers: boxes, exact covers, overlaps, and which rank writes which box.

Nothing in this room may import torch_xla, open a file or know a process group. Its tests need no devices.
"""

from torch_xla_ckpt.layout.box import Box, BoxArray, Integers
from torch_xla_ckpt.layout.cover import Flaw, covers_exactly, find_flaws
from torch_xla_ckpt.layout.overlap import ChunkIndex
from torch_xla_ckpt.layout.ownership import Claim, assign
from torch_xla_ckpt.layout.strides import elements_overlap
from torch_xla_ckpt.layout.tensor import Shard, TensorLayout

__all__ = [
    "Box",
    "BoxArray",
    "ChunkIndex",
    "Claim",
    "Flaw",
    "Integers",
    "Shard",
    "TensorLayout",
    "assign",
    "covers_exactly",
    "elements_overlap",
    "find_flaws",
]

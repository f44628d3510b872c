"""State dicts: keys of nested values, tensors with their layouts, and state of single ranks.

Planners and stagers flatten state dicts here, edit them, and fetch shards to host memory. This room knows no files and
no DCP plans.
"""

from torch_xla_ckpt.state.buffers import Buffers
from torch_xla_ckpt.state.digest import digest
from torch_xla_ckpt.state.editor import Closed, StateDictEditor
from torch_xla_ckpt.state.per_rank import PerRank
from torch_xla_ckpt.state.ranks import RankState, misfits
from torch_xla_ckpt.state.rng import random_state, set_random_state
from torch_xla_ckpt.state.shards import (
    ShardSource,
    TensorHandle,
    compact,
    fetched,
    gathered,
    lay_out,
    require_savable,
    require_targets,
)
from torch_xla_ckpt.state.tree import Leaf, Path, flatten, is_placeholder, key_of, mapped

__all__ = [
    "Buffers",
    "Closed",
    "Leaf",
    "Path",
    "PerRank",
    "RankState",
    "ShardSource",
    "StateDictEditor",
    "TensorHandle",
    "compact",
    "digest",
    "fetched",
    "flatten",
    "gathered",
    "is_placeholder",
    "key_of",
    "lay_out",
    "mapped",
    "misfits",
    "random_state",
    "require_savable",
    "require_targets",
    "set_random_state",
]

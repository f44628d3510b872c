"""The planners that DCP calls: what to write and what to read, key by key and box by box.

They know state dicts, layouts and DCP's plans. They know neither files nor torch_xla: data comes and goes through
``device.TensorAccess``, and bytes through whichever DCP storage the caller chose.
"""

from torch_xla_ckpt.planner.load import Place, SPMDLoadPlanner, copy_into
from torch_xla_ckpt.planner.match import match, mismatch_error, paths_of, unexpected_mismatches
from torch_xla_ckpt.planner.policy import Dtype, Missing, Policy, Rename, Shape, Unexpected
from torch_xla_ckpt.planner.save import SPMDSavePlanner

__all__ = [
    "Dtype",
    "Missing",
    "Place",
    "Policy",
    "Rename",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "Shape",
    "Unexpected",
    "copy_into",
    "match",
    "mismatch_error",
    "paths_of",
    "unexpected_mismatches",
]

"""The planners that DCP calls: they decide what each rank writes and reads, key by key and box by box.

Planners know state dicts, layouts and DCP's plans. They know neither files nor torch_xla: data moves through
``protocols.TensorAccess``, and bytes through the DCP storage that the caller chose.
"""

from torch_xla_ckpt.planner.copying import CopyPlanner
from torch_xla_ckpt.planner.load import SPMDLoadPlanner
from torch_xla_ckpt.planner.match import match
from torch_xla_ckpt.planner.mismatches import mismatch_error, unexpected_mismatches
from torch_xla_ckpt.planner.ongoing import Place
from torch_xla_ckpt.planner.optimizers import mark_primed
from torch_xla_ckpt.planner.policy import (
    Dtype,
    Missing,
    Policy,
    Rename,
    Shape,
    Unexpected,
    pair_wrapped_keys,
)
from torch_xla_ckpt.planner.reads import ReadPlanner, ReadPlans
from torch_xla_ckpt.planner.save import SPMDSavePlanner
from torch_xla_ckpt.planner.saved import QUANTIZED, paths_of
from torch_xla_ckpt.planner.targets import copy_into

__all__ = [
    "QUANTIZED",
    "CopyPlanner",
    "Dtype",
    "Missing",
    "Place",
    "Policy",
    "ReadPlanner",
    "ReadPlans",
    "Rename",
    "SPMDLoadPlanner",
    "SPMDSavePlanner",
    "Shape",
    "Unexpected",
    "copy_into",
    "mark_primed",
    "match",
    "mismatch_error",
    "pair_wrapped_keys",
    "paths_of",
    "unexpected_mismatches",
]

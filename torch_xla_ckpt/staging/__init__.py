"""Saving beside training: snapshots of a state, and the saves that run on them in the background.

``capture`` copies a state dict, ``stager`` decides when saves begin and in which order they run, ``upload`` knows how
each of them ended, ``peers`` lets processes coordinate beside the training loop. What is written, and how, is the
planner's and the storage's business, as in any other save.
"""

from torch_xla_ckpt.staging.stager import AsyncSave, SPMDStager
from torch_xla_ckpt.staging.upload import Upload

__all__ = [
    "AsyncSave",
    "SPMDStager",
    "Upload",
]

"""Async saves: a copy of the state is taken in milliseconds, and a thread saves the copy while training goes on.

``capture`` copies a state dict. ``stager`` decides when a save begins and in which order saves run; ``default`` is
the stager of a process that makes none. ``save`` is one async save from its call to its end, ``upload`` the future of
its commit, ``worker`` the thread that runs it. ``peers`` is the process group through which the ranks coordinate
beside the training loop. ``dcp_async`` supports plain ``dcp.async_save`` and nothing else. Planner and storage write
the copy as in any other save.
"""

from torch_xla_ckpt.staging.capture import Choice
from torch_xla_ckpt.staging.closing import ClosesOnExit
from torch_xla_ckpt.staging.default import default_stager
from torch_xla_ckpt.staging.stager import SPMDStager
from torch_xla_ckpt.staging.upload import AsyncSave, Upload

__all__ = [
    "AsyncSave",
    "Choice",
    "ClosesOnExit",
    "SPMDStager",
    "Upload",
    "default_stager",
]

"""Lightning: train, save and resume modules that are sharded by SPMD.

``strategy`` is what a Trainer calls. ``sharding`` decides how tensors and batches are cut, ``accelerator`` and
``precision`` describe the devices to Lightning. ``checkpoint`` turns Lightning's checkpoint dicts into checkpoints and
back, and ``saves`` runs saves in the background. ``loaders`` lets data loaders resume, and ``consolidate`` writes the
single file that plain Lightning opens.
"""

from torch_xla_ckpt.integrations.lightning.consolidate import consolidate
from torch_xla_ckpt.integrations.lightning.strategy import SPMDStrategy

__all__ = ["SPMDStrategy", "consolidate"]

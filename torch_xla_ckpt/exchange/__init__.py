"""Models for others: exports to safetensors folders and ``torch.save`` files, from checkpoints and from live tensors.

Reading these formats needs nothing from this room: ``formats`` and ``storage`` do it.
"""

from torch_xla_ckpt.exchange.export import export

__all__ = ["export"]

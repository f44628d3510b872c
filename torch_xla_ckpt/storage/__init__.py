"""Bytes and files: DCP storage that checks what it reads and replaces checkpoints atomically.

This room knows nothing of meshes and devices, and works without torch_xla. Nothing in it runs code from a file.
``docs/format.md`` specifies what lies on disk.
"""

from torch_xla_ckpt.storage.reader import ReadStats, ShardReader
from torch_xla_ckpt.storage.verify import VerifyReport, verify
from torch_xla_ckpt.storage.writer import ShardWriter

__all__ = ["ReadStats", "ShardReader", "ShardWriter", "VerifyReport", "verify"]

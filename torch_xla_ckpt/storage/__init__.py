"""Bytes and files: DCP storage that checks what it reads and replaces checkpoints atomically.

This room knows nothing of meshes and devices, and works without torch_xla. Nothing in it runs code from a file.
``docs/format.md`` specifies what lies on disk.
"""

from torch_xla_ckpt.storage import commit, path_lock
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import REQUEST_TIMEOUT, Location, PathLike, told_apart
from torch_xla_ckpt.storage.manifest import Manifest
from torch_xla_ckpt.storage.opening import open_reader, open_writer, path_of, required_path
from torch_xla_ckpt.storage.reader import ReadStats, ShardReader
from torch_xla_ckpt.storage.stored import checksum
from torch_xla_ckpt.storage.verify import VerifyReport, verify
from torch_xla_ckpt.storage.writer import ShardWriter

__all__ = [
    "REQUEST_TIMEOUT",
    "Location",
    "Manifest",
    "PathLike",
    "ReadStats",
    "ShardReader",
    "ShardWriter",
    "VerifyReport",
    "checksum",
    "commit",
    "open_folder",
    "open_reader",
    "open_writer",
    "path_lock",
    "path_of",
    "required_path",
    "told_apart",
    "verify",
]

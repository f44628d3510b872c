"""Pickles in archives: what ``torch.save`` writes, read without running what a file names.

``archive`` parses the zip archive, ``machine`` executes the pickle, and ``plain``, ``arrays`` and ``tensors`` rebuild
values. Each byte is parsed once, by this code: torch.load is not involved, so no two parsers can disagree about a file.
The alternative was to check an archive and to hand a repacked one to ``torch.load(weights_only=True)``. That leaves
numpy's and torch's constructors to states that a pickle sets, and takes several times as long for small objects.
"""

from torch_xla_ckpt.serialization import restricted
from torch_xla_ckpt.serialization.archive import Archive, ArchiveError
from torch_xla_ckpt.serialization.machine import Refused
from torch_xla_ckpt.serialization.metadata import METADATA, pickled_metadata, read_metadata
from torch_xla_ckpt.serialization.objects import MAX_DEPTH, Encoded, Item, decode, encode
from torch_xla_ckpt.serialization.restricted import AllowedType

__all__ = [
    "MAX_DEPTH",
    "METADATA",
    "AllowedType",
    "Archive",
    "ArchiveError",
    "Encoded",
    "Item",
    "Refused",
    "decode",
    "encode",
    "pickled_metadata",
    "read_metadata",
    "restricted",
]

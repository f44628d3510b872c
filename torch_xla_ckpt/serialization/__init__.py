"""The bytes that ``torch.save`` writes: objects to bytes, and back without running code from the file.

``archive`` parses the zip archive. ``machine`` executes the pickle, ``table`` lists what a pickle may name, and
``budget`` limits its cost. ``stand_ins`` is the machine for files of others, which goes on where a name is in no table.
``plain``, ``arrays``, ``storages`` and ``tensors`` rebuild values. This code alone parses
each byte, and only once: ``torch.load`` is not involved, so no two parsers can disagree about a file.

The alternative was to check an archive and to pass a repacked one to ``torch.load(weights_only=True)``. Then
constructors of numpy and torch would get states that a pickle sets, and small objects would take several times as long.
"""

from torch_xla_ckpt.serialization import restricted
from torch_xla_ckpt.serialization.archive import Archive, ArchiveError, parsed_ranges
from torch_xla_ckpt.serialization.metadata import METADATA, read_metadata
from torch_xla_ckpt.serialization.metadata_writing import MetadataWriter, StoredColumns
from torch_xla_ckpt.serialization.objects import MAX_DEPTH, Encoded, Item, decode, encode
from torch_xla_ckpt.serialization.restricted import AllowedType
from torch_xla_ckpt.serialization.stand_ins import StandIn, Unknown
from torch_xla_ckpt.serialization.storages import OtherByteOrder
from torch_xla_ckpt.serialization.table import Refused
from torch_xla_ckpt.serialization.writing import ArchiveWriter, StreamedTensor

__all__ = [
    "MAX_DEPTH",
    "METADATA",
    "AllowedType",
    "Archive",
    "ArchiveError",
    "ArchiveWriter",
    "Encoded",
    "Item",
    "MetadataWriter",
    "OtherByteOrder",
    "Refused",
    "StandIn",
    "StoredColumns",
    "StreamedTensor",
    "Unknown",
    "decode",
    "encode",
    "parsed_ranges",
    "read_metadata",
    "restricted",
]

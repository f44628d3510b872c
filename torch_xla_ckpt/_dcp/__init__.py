"""DCP (torch.distributed.checkpoint) as this package uses it.

All uses of DCP's private names are in this room: ``grep "_[A-Z]" torch_xla_ckpt/_dcp`` lists them. If a new torch
release moves one of them, change it here.

``values``: values of a state dict that DCP treats specially. ``metadata``: chunks, properties and the metadata of a
checkpoint. ``items``: orders to read and write. ``chunks``, ``entries``, ``item_arrays`` and ``catalog``: the same for
millions of chunks, as arrays of integers. ``calls``: ``dcp.save`` and ``dcp.load``. ``groups``: process groups
and their store. ``failures``: DCP's exceptions as ours. The steering of ``dcp.async_save`` is in
``staging/dcp_async.py``, because nothing else needs it.
"""

from torch_xla_ckpt._dcp.calls import DistWrapper, fail_to_save, load, save
from torch_xla_ckpt._dcp.catalog import Catalog, PackedCatalog
from torch_xla_ckpt._dcp.chunks import Chunks
from torch_xla_ckpt._dcp.entries import Entry, decoded_entries, encoded_entries
from torch_xla_ckpt._dcp.failures import cause
from torch_xla_ckpt._dcp.groups import default_store, is_alive, new_group, timeout_of
from torch_xla_ckpt._dcp.item_arrays import (
    AssignedItems,
    HeldItems,
    Items,
    Offers,
    PackedOffers,
    SentItems,
)
from torch_xla_ckpt._dcp.items import (
    TensorReads,
    Transfer,
    object_item,
    read_object,
    tensor_item,
    transfers,
    untransformed,
    whole_read,
)
from torch_xla_ckpt._dcp.metadata import (
    NOT_STORED,
    CompleteStorage,
    FlatMetadata,
    MemoryFormatEncoding,
    StorageInfo,
    box_of,
    boxes_of,
    chunk_of,
    cover_flaws,
    finished,
    geometry,
    is_one_chunk,
    properties,
    size_of,
    sizes_by_offsets,
    storage_info,
    unstored,
)
from torch_xla_ckpt._dcp.padding import AnyIntegers, narrow, padded_row, repadded, repeated
from torch_xla_ckpt._dcp.values import IntegerKey, dtensor_box, is_sharded_tensor, is_stateful, state_of

__all__ = [
    "NOT_STORED",
    "AnyIntegers",
    "AssignedItems",
    "Catalog",
    "Chunks",
    "CompleteStorage",
    "DistWrapper",
    "Entry",
    "FlatMetadata",
    "HeldItems",
    "IntegerKey",
    "Items",
    "MemoryFormatEncoding",
    "Offers",
    "PackedCatalog",
    "PackedOffers",
    "SentItems",
    "StorageInfo",
    "TensorReads",
    "Transfer",
    "box_of",
    "boxes_of",
    "cause",
    "chunk_of",
    "cover_flaws",
    "decoded_entries",
    "default_store",
    "dtensor_box",
    "encoded_entries",
    "fail_to_save",
    "finished",
    "geometry",
    "is_alive",
    "is_one_chunk",
    "is_sharded_tensor",
    "is_stateful",
    "load",
    "narrow",
    "new_group",
    "object_item",
    "padded_row",
    "properties",
    "read_object",
    "repadded",
    "repeated",
    "save",
    "size_of",
    "sizes_by_offsets",
    "state_of",
    "storage_info",
    "tensor_item",
    "timeout_of",
    "transfers",
    "unstored",
    "untransformed",
    "whole_read",
]

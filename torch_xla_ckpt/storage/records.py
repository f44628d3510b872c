"""What a save records about what it wrote: the bytes of the manifest and of ``.metadata``.

The parts that depend on the catalog only are made once, and used again by the next save of the same catalog.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.protocols import Bytes
from torch_xla_ckpt.serialization import MetadataWriter
from torch_xla_ckpt.storage.manifest_writing import KeptText, manifest_pieces
from torch_xla_ckpt.storage.places import Places


class _Kept:
    """The parts of the records that depend on a catalog only."""

    def __init__(self, catalog: _dcp.Catalog):
        self.writer = MetadataWriter(catalog)
        self.text = KeptText()


# Two saves never work on the same parts: a save takes them out, and puts them back when it is done.
_kept: weakref.WeakKeyDictionary[_dcp.Catalog, _Kept] = weakref.WeakKeyDictionary()


class Records:
    """The records of one save.

    Args:
        metadata: DCP's metadata, complete but for its ``storage_data``.
        catalog: everything that the checkpoint holds.
        places: where it lies.
        files: the size in bytes of each data file, by name, in the order of ``places.names``.
    """

    def __init__(self, metadata: Metadata, catalog: _dcp.Catalog, places: Places, files: Mapping[str, int]):
        self._metadata = metadata
        self._catalog = catalog
        self._places = places
        self.files = files
        self._has_paths = catalog.has_paths(metadata.planner_data)
        kept = _kept.pop(catalog, None) if self._has_paths else None
        self._parts = kept or _Kept(catalog)
        if not self._has_paths:
            self._parts.writer = MetadataWriter(catalog, (metadata.planner_data,))

    def manifest(self, head: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the bytes of the manifest. ``head`` has the members that tell about the save as a whole."""
        planner_data = self._metadata.planner_data
        return manifest_pieces(head, self.files, planner_data, self._catalog, self._places, self._parts.text)

    def pickled(self) -> Iterator[Bytes]:
        """Yield the bytes of DCP's pickle."""
        storage_meta = self._metadata.storage_meta
        assert storage_meta is not None
        return self._parts.writer.pieces(storage_meta, self._metadata.version, self._places.names, self._places)

    def keep(self) -> None:
        """Keep what the next save of the same catalog can use again. Call this after the records are written."""
        if self._has_paths:
            _kept[self._catalog] = self._parts

"""What a save records about what it wrote: the bytes of the manifest and of ``.metadata``.

The parts that depend on the catalog only are made once, and used again by the next save of the same catalog.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.protocols import Bytes
from torch_xla_ckpt.serialization import MetadataWriter
from torch_xla_ckpt.storage.manifest_tensors import KeptText
from torch_xla_ckpt.storage.manifest_writing import manifest_pieces
from torch_xla_ckpt.storage.placing import Placing, placed
from torch_xla_ckpt.storage.written import Written


class _Kept:
    """The parts of the records that depend on a catalog only."""

    def __init__(self, catalog: _dcp.Catalog):
        self.writer = MetadataWriter(catalog)
        self.text = KeptText()
        self.placing: Placing | None = None


_MOST = 2  # catalogs whose parts are kept: a program may save two kinds of states in turn
# Two saves never work on the same parts: a save takes them out, and puts them back when it is done.
_kept: list[tuple[_dcp.Catalog, _Kept]] = []


def _taken(catalog: _dcp.Catalog) -> _Kept | None:
    """Take out the parts of a catalog; return None if there are none, or if another save has them."""
    for one in list(_kept):
        if one[0] is catalog:
            with suppress(ValueError):
                _kept.remove(one)
                return one[1]
    return None


class Records:
    """The records of one save.

    Args:
        metadata: DCP's metadata, complete but for its ``storage_data``.
        catalog: everything that the checkpoint holds.
        results: what each rank has written.
        rows: for each rank, the catalog's row of each item in its plan; None if they are unknown.

    Attributes:
        places: where everything lies.
        files: the size in bytes of each data file, by name, in the order of ``places.names``.

    Raises:
        CheckpointError: a rank has sent another number of checksums than of blocks, or no place for an item.
    """

    def __init__(
        self,
        metadata: Metadata,
        catalog: _dcp.Catalog,
        results: Sequence[Written],
        rows: Sequence[Integers | None],
    ):
        self._metadata = metadata
        self._catalog = catalog
        self._has_paths = catalog.has_paths(metadata.planner_data)
        kept = _taken(catalog) if self._has_paths else None
        self._parts = kept or _Kept(catalog)
        if not self._has_paths:
            self._parts.writer = MetadataWriter(catalog, (metadata.planner_data,))
        self._parts.placing, self.places, self.files = placed(catalog, results, rows, self._parts.placing)

    def manifest(self, head: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the bytes of the manifest. ``head`` has the members that tell about the save as a whole."""
        planner_data = self._metadata.planner_data
        return manifest_pieces(head, self.files, planner_data, self._catalog, self.places, self._parts.text)

    def pickled(self) -> Iterator[Bytes]:
        """Yield the bytes of DCP's pickle."""
        storage_meta = self._metadata.storage_meta
        assert storage_meta is not None
        return self._parts.writer.pieces(storage_meta, self._metadata.version, self.places.names, self.places)

    def keep(self) -> None:
        """Keep what the next save of the same catalog can use again. Call this after the records are written."""
        if self._has_paths:
            _kept[:] = [(self._catalog, self._parts), *(one for one in _kept if one[0] is not self._catalog)][:_MOST]

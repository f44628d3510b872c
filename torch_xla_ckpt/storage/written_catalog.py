"""The catalog of what the ranks have written, and the proof before the commit that nothing of it is missing."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import IncompleteCheckpointError
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.storage.places import Places, Written, WrittenItems, placed, unplaced


def written_catalog(
    metadata: Metadata,
    results: Sequence[Written],
    items: Sequence[_dcp.AssignedItems | None],
    names: Sequence[str],
) -> tuple[_dcp.Catalog, Places]:
    """Return everything that the checkpoint holds, and where it lies.

    Args:
        metadata: DCP's metadata.
        results: what each rank has written.
        items: the items in each rank's plan; None if another planner made the plan.
        names: the names of the data files.

    Raises:
        IncompleteCheckpointError: a part of the catalog is in no data file. The error names the keys.
    """
    catalog, listed, rows = _catalog_of(metadata, list(results), items)
    places = placed(catalog, list(names), listed, rows)
    lost = unplaced(catalog, places)
    if lost:
        raise IncompleteCheckpointError(
            "the checkpoint was not committed, because no process wrote all of "
            + ", ".join(f"{key!r} ({parts} of its parts are missing)" for key, parts in lost.items())
            + ". The planner assigned these parts to no process. Save with SPMDSavePlanner or DCP's own planner",
            keys=tuple(lost),
        )
    return catalog, places


def _catalog_of(
    metadata: Metadata, results: list[Written], items: Sequence[_dcp.AssignedItems | None]
) -> tuple[_dcp.Catalog, list[Written], list[Integers | None]]:
    """Return everything that the checkpoint holds, the results, and the rows of the items in each rank's plan."""
    catalogs = [own.catalog for own in items if own is not None]
    if len(catalogs) == len(results) and catalogs[0].describes(metadata):
        return catalogs[0], results, [None if own is None else own.rows for own in items]
    # Another planner planned the save, or a subclass of ours has changed the metadata.
    listed = [
        written.results(own) if isinstance(written, WrittenItems) and own is not None else written
        for written, own in zip(results, items)
    ]
    shardings = {entry.key: entry.sharding for catalog in catalogs[:1] for entry in catalog.entries}
    for result in (result for own in listed if not isinstance(own, WrittenItems) for result in own):
        if result.storage_data.sharding:
            shardings[result.index.fqn] = result.storage_data.sharding
    return _dcp.Catalog.of(metadata, shardings), listed, [None] * len(results)

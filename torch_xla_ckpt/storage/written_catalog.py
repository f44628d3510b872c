"""The catalog of what the ranks have written, and the proof before the commit that nothing of it is missing."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import _dcp
from torch_xla_ckpt.errors import IncompleteCheckpointError
from torch_xla_ckpt.layout import Integers
from torch_xla_ckpt.storage.places import Places, unplaced
from torch_xla_ckpt.storage.written import Written, WrittenItems


def written_catalog(
    metadata: Metadata, results: list[Written], items: Sequence[_dcp.AssignedItems | None]
) -> tuple[_dcp.Catalog, list[Written], list[Integers | None]]:
    """Return everything that the checkpoint holds, what each rank has written, and the catalog's row of each item.

    Args:
        metadata: DCP's metadata.
        results: what each rank has written.
        items: the items in each rank's plan; None if another planner made the plan.

    Returns:
        The catalog; the results, as lists if another planner planned the save or a subclass of ours changed the
        metadata; and for each rank the rows of the items in its plan, None if the results are lists.
    """
    catalogs = [own.catalog for own in items if own is not None]
    if len(catalogs) == len(results) and catalogs[0].describes(metadata):
        return catalogs[0], results, [None if own is None else own.rows for own in items]
    listed = [
        written.results(own) if isinstance(written, WrittenItems) and own is not None else written
        for written, own in zip(results, items)
    ]
    shardings = {entry.key: entry.sharding for catalog in catalogs[:1] for entry in catalog.entries}
    for result in (result for own in listed if not isinstance(own, WrittenItems) for result in own):
        if result.storage_data.sharding:
            shardings[result.index.fqn] = result.storage_data.sharding
    return _dcp.Catalog.of(metadata, shardings), listed, [None] * len(results)


def require_all_written(catalog: _dcp.Catalog, places: Places) -> None:
    """Check before the commit that each item of the catalog is in a data file.

    Raises:
        IncompleteCheckpointError: naming the keys of missing items.
    """
    lost = unplaced(catalog, places)
    if lost:
        raise IncompleteCheckpointError(
            "the checkpoint was not committed, because no process wrote all of "
            + ", ".join(f"{key!r} ({parts} of its parts are missing)" for key, parts in lost.items())
            + ". The planner assigned these parts to no process. Save with SPMDSavePlanner or DCP's own planner",
            keys=tuple(lost),
        )

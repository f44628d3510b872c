"""Checks of what a simulated pod has planned and written. A number means nothing if what it measures is wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from torch_xla_ckpt.errors import IncompleteCheckpointError
from torch_xla_ckpt.planner import SPMDSavePlanner
from torch_xla_ckpt.serialization import MetadataWriter
from torch_xla_ckpt.storage import Manifest, read_index
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import Location
from torch_xla_ckpt.storage.manifest_tensors import KeptText
from torch_xla_ckpt.storage.manifest_writing import manifest_pieces
from torch_xla_ckpt.storage.places import StorageEntries


def check_records(path: Path, saved: Metadata) -> None:
    """Check what a save has written.

    What stock Python unpickles equals what was saved; the manifest says the same; and a full encoding without anything
    from an earlier save gives the same bytes.
    """
    data = (path / ".metadata").read_bytes()
    found: Metadata = pickle.loads(data)
    _require(list(found.state_dict_metadata) == list(saved.state_dict_metadata), "keys")
    for key, one in found.state_dict_metadata.items():
        other = saved.state_dict_metadata[key]
        if isinstance(one, BytesStorageMetadata) or isinstance(other, BytesStorageMetadata):
            _require(one == other, key)
            continue
        _require((one.properties, one.size) == (other.properties, other.size), key)
        _require(one.chunks == list(other.chunks), key)
    _require((found.planner_data, found.storage_meta) == (saved.planner_data, saved.storage_meta), "planner data")
    index = read_index(open_folder(Location.of(path)))
    _require(isinstance(index.manifest, Manifest), "manifest")
    _check_places(found, index.metadata, saved)
    entries: Any = saved.storage_data
    assert isinstance(entries, StorageEntries) and found.storage_meta is not None
    full = MetadataWriter(entries.catalog).pieces(
        found.storage_meta, found.version, entries.places.names, entries.places
    )
    _require(data.startswith(b"".join(full)), "a full encoding of .metadata")
    written = next(path.glob("manifest-*.json")).read_bytes()
    top = json.loads(written)
    made = ("format", "version", "files", "paths", "shardings", "boxes", "tensors", "objects", "xxh3_64")
    head = {name: value for name, value in top.items() if name not in made}
    again = manifest_pieces(head, dict(top["files"]), saved.planner_data, entries.catalog, entries.places, KeptText())
    _require(b"".join(again) == written, "a full encoding of the manifest")


def _check_places(found: Metadata, read: Metadata, saved: Metadata) -> None:
    count = 0
    for key, one in found.state_dict_metadata.items():
        offsets = [chunk.offsets for chunk in one.chunks] if isinstance(one, TensorStorageMetadata) else [None]
        for offset in offsets:
            index = MetadataIndex(key, offset)
            stored, other = found.storage_data[index], read.storage_data[index]
            _require(stored == saved.storage_data[index], str(index))
            _require((stored.relative_path, stored.offset, stored.length) == other[:3], str(index))
            count += 1
    _require(count == len(found.storage_data) == len(read.storage_data), "the number of items")


def check_incomplete(plans: Sequence[Any], planner: SPMDSavePlanner) -> None:
    """Check that a save in which some hosts take no part is refused.

    Args:
        plans: the plans of the other hosts, which lack some boxes.
        planner: the coordinator's planner.
    """
    try:
        planner.create_global_plan(list(plans))
    except IncompleteCheckpointError:
        return
    raise SystemExit("the proof accepted a plan without the boxes of some hosts")


def _require(equal: bool, what: str) -> None:
    if not equal:
        raise SystemExit(f"the records are wrong: {what}")

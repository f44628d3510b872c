"""The records of a checkpoint, compared with what a full encoding gives."""

import json

from torch_xla_ckpt.serialization import MetadataWriter
from torch_xla_ckpt.storage.manifest_tensors import KeptText
from torch_xla_ckpt.storage.manifest_writing import manifest_pieces

_OF_THE_SAVE = ("save_id", "time", "step", "user_metadata", "software", "writer", "block")


def assert_records_are_a_full_encoding(path, metadata):
    """Fail if a byte of ``.metadata`` or of the manifest differs from what a save without any kept part writes.

    Args:
        path: the folder of the checkpoint.
        metadata: what the save has returned on the coordinator.
    """
    entries = metadata.storage_data
    places, catalog = entries.places, entries.catalog
    (manifest,) = path.glob("manifest-*.json")
    top = json.loads(manifest.read_bytes())
    version = "1.0.0"
    pickled = b"".join(MetadataWriter(catalog).pieces(metadata.storage_meta, version, places.names, places))
    found = (path / ".metadata").read_bytes()
    assert found[: len(pickled)] == pickled, "the pickle in .metadata is not what a full encoding gives"
    assert len(found) - len(pickled) == 67, "something else than the seal follows the pickle"
    head = {name: top[name] for name in _OF_THE_SAVE}
    files = dict(top["files"])
    assert list(files) == places.names
    assert files == {name: (path / name).stat().st_size for name in files}
    full = b"".join(manifest_pieces(head, files, metadata.planner_data, catalog, places, KeptText()))
    assert manifest.read_bytes() == full, "the manifest is not what a full encoding gives"

"""The place of a tensor's elements in an item of stock DCP is found, wherever the item lies."""

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from torch_xla_ckpt.inspecting.locating import located
from torch_xla_ckpt.storage import Stored
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import Location


@pytest.mark.parametrize("rows", [3, 40_000], ids=["a whole item is read", "a part of an item is read"])
@pytest.mark.parametrize("remote", [False, True], ids=["local", "store"])
def test_elements_lie_where_they_are_said_to_lie(tmp_path, rows, remote):
    tensor = torch.arange(rows * 4.0).reshape(rows, 4)
    dcp.save({"t": tensor}, checkpoint_id=tmp_path)
    (entry,) = dcp.FileSystemReader(tmp_path).read_metadata().storage_data.values()
    data = (tmp_path / entry.relative_path).read_bytes()
    place = str(tmp_path)
    if remote:
        place = f"memory://locating/{rows}"
        fsspec.filesystem("memory").pipe_file(f"/locating/{rows}/{entry.relative_path}", data)
    found = located(open_folder(Location.of(place)), Stored.of(entry), (rows, 4), torch.float32)
    assert found.data is not None
    start = entry.offset + found.data
    assert data[start : start + tensor.nbytes] == tensor.numpy().tobytes()

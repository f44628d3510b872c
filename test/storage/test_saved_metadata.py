"""The metadata that a save returns prints as one line, and is DCP's ``Metadata`` in every other respect."""

import copy
import dataclasses
import pickle
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import torch_xla_ckpt as xc
from support import interpreters

pytestmark = pytest.mark.slow

STATE = {"a": torch.ones(1 << 20), "b": {"c": torch.ones(3), "n": 1}}
LINE = r"<Metadata of 3 keys, 4 MiB, saved in \d+\.\d\d s>"


def save(path, way):
    if way == "xc":
        return xc.save(STATE, path)
    planner = {"dcp": dcp.DefaultSavePlanner, "dcp, our planner": xc.SPMDSavePlanner}[way]()
    return dcp.save(STATE, storage_writer=xc.ShardWriter(path), planner=planner)


@pytest.mark.parametrize("way", ["xc", "dcp", "dcp, our planner"])
def test_metadata_of_a_save_prints_as_one_line(tmp_path, way):
    metadata = save(tmp_path, way)
    for text in (repr(metadata), str(metadata), f"{metadata}"):
        assert re.fullmatch(LINE, text), text


def test_metadata_of_an_async_save_prints_as_one_line(tmp_path):
    with xc.SPMDStager() as stager:
        metadata = xc.async_save(STATE, tmp_path, stager=stager).result()
    assert re.fullmatch(LINE, repr(metadata))


def test_a_line_without_data_and_seconds_is_printed_too(tmp_path):
    metadata = dataclasses.replace(xc.save({"n": 1}, tmp_path), storage_data=None)
    assert repr(metadata) == "<Metadata of 1 key, 0 B>"


def test_metadata_of_a_save_is_equal_to_dcps(tmp_path):
    metadata = save(tmp_path, "xc")
    as_dcps = Metadata(**{field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)})
    assert isinstance(metadata, Metadata)
    assert metadata == as_dcps and as_dcps == metadata
    assert metadata != dataclasses.replace(as_dcps, version="another") and metadata != "text"
    with pytest.raises(TypeError, match="unhashable"):
        hash(metadata)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, dataclasses.replace, lambda metadata: pickle.loads(pickle.dumps(metadata))]
)
def test_copies_of_metadata_are_equal(tmp_path, copied):
    metadata = save(tmp_path, "xc")
    found = copied(metadata)
    assert isinstance(found, Metadata) and found == metadata
    changed = dataclasses.replace(found, version="another")
    assert changed.version == "another" and changed != metadata


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_metadata_opens_without_this_package(tmp_path, protocol):
    metadata = save(tmp_path / "c", "xc")
    data = pickle.dumps(metadata, protocol)
    assert b"torch_xla_ckpt" not in data
    (tmp_path / "pickle").write_bytes(data)
    program = f"""
import pickle, sys
sys.modules["torch_xla_ckpt"] = None
from torch.distributed.checkpoint.metadata import Metadata
with open({str(tmp_path / "pickle")!r}, "rb") as file:
    metadata = pickle.load(file)
assert type(metadata) is Metadata and set(metadata.state_dict_metadata) == {{"a", "b.c", "b.n"}}
"""
    if protocol in (2, pickle.HIGHEST_PROTOCOL):  # a process each takes seconds
        options = {"env": {"PYTHONPATH": ""}, "modules": interpreters.STOCK, "cwd": tmp_path}
        done = interpreters.run(["-c", program], **options)
        assert done.returncode == 0, done.stderr
    assert type(pickle.loads(data)) is Metadata


class OneMetadata(dcp.DefaultSavePlanner):
    """A planner that uses the metadata of its first save again."""

    metadata = None

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        self.metadata = self.metadata or metadata
        return plans, self.metadata


def test_metadata_of_an_earlier_save_is_written_as_dcps_own_class(tmp_path):
    planner = OneMetadata()
    sizes = []
    for _ in range(2):
        dcp.save({"t": torch.ones(3)}, storage_writer=xc.ShardWriter(tmp_path), planner=planner)
        data = (tmp_path / ".metadata").read_bytes()
        assert type(pickle.loads(data)) is Metadata and b"torch_xla_ckpt.storage" not in data
        sizes.append(len(data))
    assert sizes[0] == sizes[1]
    target = {"t": torch.zeros(3)}
    xc.load(target, tmp_path)
    assert target["t"].eq(1).all()

"""Every command on a store: URLs, options of the store, and byte ranges."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from support import kinds
from support.command_line import call
from support.s3 import Server, asks, count, refused

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20


@pytest.fixture(scope="module")
def s3():
    with Server() as server:
        yield server


def options_of(server):
    pairs = []
    for name, value in server.options.items():
        pairs += ["--storage-option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return pairs


@pytest.mark.slow
def test_every_command_over_s3(s3):
    with s3.bucket("commands") as bucket:
        url = f"s3://{bucket.name}/run"
        for step in (1, 2):
            xc.save(kinds.host_state(float(step)), f"{url}/{step}", storage_options=s3.options)
        options = options_of(s3)
        assert [one["step"] for one in call("ls", url, "--json", *options).json["steps"]] == [1, 2]
        assert "layers.{0..2}" in call("ls", f"{url}/latest", *options).out
        assert call("show", f"{url}/2", "model.layers.1.bias", "--json", *options).json["values"] == [2.0] * 8
        assert call("verify", url, *options).status == 0
        assert call("diff", f"{url}/1", f"{url}/2", *options).status == 1
        assert call("diff", f"{url}/1", f"{url}/1", *options).status == 0
        refused = call("ls", f"s3://{bucket.name}/nothing", *options)
        assert refused.status == 2 and len(refused.err.splitlines()) == 1


def test_a_slice_in_a_store_is_read_by_ranges(s3):
    with s3.bucket("slices") as bucket:
        url = f"s3://{bucket.name}/c"
        xc.save({"w": torch.randn(8, MIB)}, url, storage_options=s3.options)  # 32 MiB
        with s3.recorded() as log:
            assert call("show", url, "w[3, :4]", *options_of(s3)).status == 0
        assert sum(one.sent for one in log if one.name.endswith(".distcp")) <= 8 * MIB
        assert count(log)["PutObject"] == 0


def test_every_command_reaches_a_store(s3, tmp_path):
    with s3.bucket("more") as bucket:
        url = f"s3://{bucket.name}/run"
        for step in (1, 2):
            xc.save(kinds.host_state(float(step)), f"{url}/{step}", step=step, storage_options=s3.options)
        options = options_of(s3)
        assert call("explain", f"{url}/latest", "--mesh", "a=2", "--against", f"{url}/1", *options).status == 0
        assert call("convert", f"{url}/1", f"s3://{bucket.name}/c", *options).status == 0
        assert call("diff", f"{url}/1", f"s3://{bucket.name}/c", *options).status == 0
        assert call("export", f"{url}/latest", f"s3://{bucket.name}/hf", "--key", "model", *options).status == 0
        bias = call("show", f"s3://{bucket.name}/hf", "layers.1.bias", "--json", *options)
        assert bias.json["values"] == [2.0] * 8
        with s3.recorded() as log:
            assert call("prune", url, "--keep", "latest:1", *options).status == 0
            assert call("convert", f"{url}/1", f"s3://{bucket.name}/d", "--dry-run", *options).status == 0
            assert (
                call("export", f"{url}/1", f"s3://{bucket.name}/e", "--key", "model", "--dry-run", *options).status == 0
            )
            assert call("report", url, "-o", tmp_path / "r.html", *options).status == 0
        assert not {"PutObject", "DeleteObject", "DeleteObjects", "CreateMultipartUpload"} & set(count(log))


def test_a_slice_of_a_large_chunk_of_stock_dcp_is_read_by_ranges(s3, tmp_path):
    with s3.bucket("stock") as bucket:
        whole = torch.randn(12, MIB)  # 48 MiB
        dcp.save({"w": whole}, checkpoint_id=tmp_path / "c", no_dist=True)
        for path in (tmp_path / "c").iterdir():
            bucket[f"c/{path.name}"] = path.read_bytes()
        with s3.recorded() as log:
            answer = call("show", f"s3://{bucket.name}/c", "w[3, :4]", "--json", *options_of(s3))
        assert answer.json["values"] == whole[3, :4].tolist()
        assert sum(one.sent for one in log if one.name.endswith(".distcp")) <= MIB


def test_a_store_that_refuses_is_one_line_that_says_so(s3):
    with s3.bucket("closed") as bucket, s3.failing(refused, asks("ListObjects")):
        answer = call("ls", f"s3://{bucket.name}/c", *options_of(s3))
        assert answer.status == 2 and len(answer.err.splitlines()) == 1 and "access" in answer.err.lower(), answer.err

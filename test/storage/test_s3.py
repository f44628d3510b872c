"""Checkpoints in an object store: a real S3 API on loopback that refuses, loses, garbles and delays requests."""

import dataclasses
import itertools
import logging

import fsspec
import pytest
import s3fs
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import torch_xla_ckpt as xc
from support import hosts
from support.meshes import holds, mesh, put, random_bits, same_bits
from support.s3 import (
    Hold,
    Saving,
    Server,
    Together,
    asks,
    bit_flipped,
    broken_after,
    broken_before,
    broken_off,
    count,
    cut_short,
    host_state,
    not_there,
    refused,
    slow_down,
)
from torch_xla_ckpt.storage.lease import Holder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MIB = 1 << 20


@pytest.fixture(scope="module")
def s3():
    with Server() as server:
        yield server


@pytest.fixture
def bucket(s3):
    with s3.bucket("bucket-of-one-test") as bucket:
        yield bucket


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The URL of a checkpoint, and the storage options to reach it."""

    url: str
    options: dict

    def save(self, state, **how):
        xc.save(state, self.url, storage_writer=xc.ShardWriter(self.url, storage_options=self.options, **how))

    def load(self, target, **how):
        reader = xc.ShardReader(self.url, storage_options=self.options, **how)
        return xc.load(target, self.url, storage_reader=reader)

    def verify(self):
        return xc.verify(self.url, storage_options=self.options)

    def has(self, state, **how):
        """Whether it holds exactly these tensors of the host."""
        target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        self.load(target, **how)
        return all(same_bits(target[key], tensor) for key, tensor in state.items())


@pytest.fixture
def checkpoint(bucket):
    return Checkpoint(f"s3://{bucket.name}/run/step-1", bucket.server.options)


def one(keys, ending):
    (found,) = [key for key in keys if key.endswith(ending)]
    return found


def stored(requests):
    """The requests that read data files."""
    return [request for request in requests if request.operation == "GetObject" and request.name.endswith(".distcp")]


def sent(requests):
    return sum(request.sent for request in requests)


# There and back.


TENSORS = {
    "tiled": ((512, 1024), ("a", "b")),
    "padded": ((7, 5), ("a", "b")),
    "partly_replicated": ((1024, 512), ("a", None)),
    "columns": ((300, 2048), (None, ("a", "b"))),
    "replicated": ((1024, 1024), (None, None)),
    "unmarked": ((5, 3), None),
    "scalar": ((), None),
    "empty": ((0, 4), ("a", None)),
}


def xla_state(on, hosts=None):
    values = hosts or {key: torch.zeros(shape) for key, (shape, _) in TENSORS.items()}
    return {"model": {key: put(value, on, TENSORS[key][1]) for key, value in values.items()}, "step": 7 if hosts else 0}


def xla_hosts():
    return {key: random_bits(shape, torch.float32, n) for n, (key, (shape, _)) in enumerate(TENSORS.items())}


@pytest.mark.parametrize("threads", [1, None])
def test_a_checkpoint_in_s3_is_loaded_onto_another_mesh(threads, checkpoint, bucket):
    saved = xla_hosts()
    checkpoint.save(xla_state(mesh((4, 2), order=[3, 1, 4, 0, 5, 2, 6, 7]), saved), threads=threads)
    target = xla_state(mesh((2, 4)))
    report = checkpoint.load(target, threads=threads)
    for key, host in saved.items():
        assert holds(target["model"][key], host), key
    assert target["step"] == 7
    assert report.bytes_needed >= sum(host.nbytes for host in saved.values())
    assert not bucket.pending()


def test_save_and_load_need_only_a_url_if_boto_is_configured(bucket, monkeypatch):
    settings = {"ENDPOINT_URL": bucket.server.url, "ACCESS_KEY_ID": "nobody", "SECRET_ACCESS_KEY": "nothing"}
    for name, value in {**settings, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        url = f"s3://{bucket.name}/run/step-1"
        xc.save({"t": put(torch.arange(64.0), mesh((8,)), ("a",)), "step": 7}, url)
        target = {"t": torch.zeros(64), "step": 0}
        xc.load(target, url)
        assert same_bits(target["t"], torch.arange(64.0)) and target["step"] == 7
        assert xc.verify(url).ok
        assert any(key.startswith("run/step-1/manifest-") for key in bucket.objects()), "not our storage"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_stock_pytorch_loads_our_checkpoint_from_s3(checkpoint):
    saved = xla_hosts()
    checkpoint.save(xla_state(mesh((4, 2)), saved))
    target = {"model": {key: torch.zeros_like(host) for key, host in saved.items()}, "step": 0}
    dcp.load(target, storage_reader=FsspecReader(checkpoint.url, **checkpoint.options))
    assert all(same_bits(target["model"][key], host) for key, host in saved.items()) and target["step"] == 7


def test_a_checkpoint_of_stock_pytorch_in_s3_is_loaded_and_then_replaced(checkpoint, bucket):
    saved = xla_hosts()
    dcp.save(
        {"model": saved, "step": 7}, storage_writer=FsspecWriter(checkpoint.url, sync_files=False, **checkpoint.options)
    )
    target = xla_state(mesh((2, 4)))
    checkpoint.load(target)
    assert all(holds(target["model"][key], host) for key, host in saved.items()) and target["step"] == 7
    before = set(bucket.objects())
    checkpoint.save(host_state(1, 1))
    assert checkpoint.has(host_state(1, 1))
    assert set(bucket.objects()) & before == {"run/step-1/.metadata"}


def test_a_missing_checkpoint_or_bucket_is_named_in_the_error(checkpoint, bucket):
    with pytest.raises(xc.CheckpointError, match="no checkpoint"):
        checkpoint.load({"t": torch.zeros(1)})
    nowhere = Checkpoint("s3://no-such-bucket/run/step-1", checkpoint.options)
    with pytest.raises(xc.CheckpointError, match=r"no-such-bucket|no checkpoint"):
        nowhere.load({"t": torch.zeros(1)})
    with pytest.raises(xc.CheckpointError, match=r"bucket"):
        nowhere.save({"t": torch.zeros(1)})
    assert "no-such-bucket" not in [found["Name"] for found in bucket.server.client.list_buckets()["Buckets"]]


# Damage.


def flipped(bucket, key):
    data = bytearray(bucket[key])
    data[len(data) // 2] ^= 1
    bucket[key] = bytes(data)


def truncated(bucket, key):
    bucket[key] = bucket[key][:-10]


def halved(bucket, key):
    """Cut an object in half. S3 answers with an error for ranges that begin behind the end."""
    bucket[key] = bucket[key][: len(bucket[key]) // 2]


def emptied(bucket, key):
    bucket[key] = b""


def removed(bucket, key):
    del bucket[key]


@pytest.mark.parametrize("damage", [flipped, truncated, halved, emptied, removed])
def test_a_damaged_data_object_is_reported_and_not_loaded(damage, checkpoint, bucket):
    """s3fs has listed the folder before the damage, and caches the listing."""
    state = host_state(0, 10)
    checkpoint.save(state, threads=1)
    assert checkpoint.verify().ok and checkpoint.has(state)
    key = one(bucket.objects(), ".distcp")
    damage(bucket, key)
    report = checkpoint.verify()
    assert not report.ok and {found.file for found in report.damages} == {key.rpartition("/")[2]}
    named = {name for found in report.damages for name in found.keys}
    assert named and named <= set(state)
    if damage is flipped:
        (found,) = report.damages
        assert found.start <= len(bucket[key]) // 2 < found.stop
    if damage in (emptied, removed):
        assert named == set(state)
    with pytest.raises(xc.CorruptCheckpointError, match=key.rpartition("/")[2]):
        checkpoint.has(state)


@pytest.mark.parametrize("damage", [flipped, truncated, halved, emptied, removed])
@pytest.mark.parametrize("ending", [".metadata", ".json"])
def test_a_damaged_metadata_or_manifest_object_is_reported_and_not_loaded(ending, damage, checkpoint, bucket):
    checkpoint.save(host_state(0, 1))
    key = one(bucket.objects(), ending)
    damage(bucket, key)
    with pytest.raises(xc.CheckpointError):
        checkpoint.has(host_state(0, 1))
    if (ending, damage) != (".metadata", removed):
        assert not checkpoint.verify().ok


# Replacing.


def test_a_save_removes_the_objects_of_the_previous_save(checkpoint, bucket):
    checkpoint.save(host_state(0), threads=1)
    old = set(bucket.objects())
    checkpoint.save(host_state(1), threads=1)
    new = set(bucket.objects())
    assert old & new == {"run/step-1/.metadata"} and len(new) == 3
    assert not bucket.pending()
    assert checkpoint.has(host_state(1)) and checkpoint.verify().ok


def test_a_save_touches_no_objects_and_uploads_of_others(checkpoint, bucket):
    """Others have paths with the same beginning, objects in the folder, and unfinished uploads."""
    neighbour = Checkpoint(checkpoint.url + "0", checkpoint.options)
    neighbour.save(host_state(5, 1))
    bucket["run/step-1/notes.txt"] = b"do not lose me"
    bucket["run/step-1/more/.metadata"] = b"nor me"
    data = "__0_0-0123456789abcdef.distcp"
    bucket[f"run/step-1/more/{data}"] = b"nor me"
    others = set(bucket.objects())
    for key in ("elsewhere/big", f"run/step-10/{data}", f"run/step-1/more/{data}", "run/step-1/notes.bin"):
        bucket.server.client.create_multipart_upload(Bucket=bucket.name, Key=key)
    pending = bucket.pending()
    for seed in (0, 1):
        checkpoint.save(host_state(seed))
    assert others <= set(bucket.objects()) and bucket.pending() == pending
    assert neighbour.has(host_state(5, 1)) and checkpoint.has(host_state(1))


def test_old_objects_are_removed_only_after_the_commit(checkpoint, bucket):
    """The server records the order: lease, data and manifest, then .metadata, and then the removals."""
    checkpoint.save(host_state(0))
    old = set(bucket.objects())
    with bucket.server.recorded() as requests:
        checkpoint.save(host_state(1))
    writes = {"PutObject", "CopyObject", "CompleteMultipartUpload"}
    commits = [n for n, r in enumerate(requests) if r.operation in writes and r.name == ".metadata"]
    assert len(commits) == 1
    (commit,) = commits
    assert all(request.operation not in writes for request in requests[commit + 1 :])
    assert all("Delete" not in request.operation for request in requests[:commit])
    assert any("Delete" in request.operation for request in requests[commit:])
    written = [request.name for request in requests if request.operation in writes]
    kinds = [name.partition("-")[0] if name.endswith(".json") else name[-7:] for name in written]
    assert kinds[-1] == "etadata" and set(kinds[:-1]) == {"lease", "manifest", ".distcp"}
    assert kinds.count("manifest") == 1 and kinds.index("lease") < kinds.index("manifest")
    assert not {request.key for request in requests if request.operation in writes} & (old - {"run/step-1/.metadata"})


def test_a_load_sees_what_another_process_saved_meanwhile(checkpoint, bucket):
    """s3fs caches listings and sizes for as long as the process lives."""
    checkpoint.save(host_state(0), threads=1)
    assert checkpoint.has(host_state(0))
    assert Saving(checkpoint.url, checkpoint.options, seed=1).said() == [""]
    assert checkpoint.has(host_state(1)) and checkpoint.verify().ok
    checkpoint.save(host_state(2), threads=1)
    assert checkpoint.has(host_state(2)) and len(bucket.objects()) == 3


# Saves that break off.

STEPS = {
    "beginning an upload": asks("CreateMultipartUpload", "*.distcp"),
    "uploading a part": asks("UploadPart", "*.distcp"),
    "completing an upload": asks("CompleteMultipartUpload", "*.distcp"),
    "the manifest": asks("PutObject", "manifest-*"),
    "the commit": asks("PutObject", ".metadata"),
}


def removes(request):
    return request.operation in ("DeleteObject", "DeleteObjects")


@pytest.mark.parametrize("step", STEPS)
def test_a_refused_request_fails_the_save_with_its_reason_and_the_old_checkpoint_stays(step, checkpoint, bucket):
    checkpoint.save(host_state(0), threads=1)
    old = {key: bucket[key] for key in bucket.objects()}
    with bucket.server.failing(refused, STEPS[step]) as met, pytest.raises(xc.CheckpointError, match="closed today"):
        checkpoint.save(host_state(1), threads=1)
    assert met and {key: bucket[key] for key in bucket.objects() if key in old} == old
    assert not bucket.pending(), "an upload that was given up costs money until somebody aborts it"
    assert checkpoint.has(host_state(0)) and checkpoint.verify().ok
    checkpoint.save(host_state(2), threads=1)
    assert checkpoint.has(host_state(2)) and len(bucket.objects()) == 3 and not bucket.pending()


def test_a_first_save_that_is_refused_leaves_no_checkpoint(checkpoint, bucket):
    with bucket.server.failing(refused, asks("PutObject", ".metadata")), pytest.raises(xc.CheckpointError):
        checkpoint.save(host_state(1), threads=1)
    with pytest.raises(xc.CheckpointError, match="no checkpoint"):
        checkpoint.has(host_state(1))
    checkpoint.save(host_state(2), threads=1)
    assert checkpoint.has(host_state(2)) and len(bucket.objects()) == 3 and not bucket.pending()


def test_a_save_fails_if_one_of_several_uploads_is_refused(checkpoint, bucket):
    """DCP's own writer reports success."""
    checkpoint.save(host_state(0), threads=4)
    failing = bucket.server.failing(refused, lambda request: request.received > MIB, times=1)
    with failing as met, pytest.raises(xc.CheckpointError, match="closed today"):
        checkpoint.save(host_state(1), threads=4)
    assert met and checkpoint.has(host_state(0)) and not bucket.pending()


def test_a_save_succeeds_although_old_objects_cannot_be_removed(checkpoint, bucket, caplog):
    checkpoint.save(host_state(0), threads=1)
    with bucket.server.failing(refused, removes) as met, caplog.at_level(logging.WARNING):
        checkpoint.save(host_state(1), threads=1)
    assert met and "closed today" in caplog.text
    assert checkpoint.has(host_state(1))
    checkpoint.save(host_state(2), threads=1)
    assert checkpoint.has(host_state(2)) and len(bucket.objects()) == 3


@pytest.mark.parametrize("step", [*STEPS, "removing the old", "the end"])
def test_a_process_killed_during_a_save_leaves_the_old_checkpoint_or_the_new_one(step, checkpoint, bucket):
    """The process is killed before each kind of request is carried out; "the end" is after the last one."""
    checkpoint.save(host_state(0), threads=1)
    hold = Hold(done=step == "the end")
    with bucket.server.failing(hold, STEPS.get(step, removes), times=1) as met:
        child = Saving(checkpoint.url, checkpoint.options, seed=1)
        try:
            assert hold.here.wait(60), child.said()
        finally:
            child.kill()
    interrupted = met[0].operation in ("UploadPart", "CompleteMultipartUpload")
    assert bool(bucket.pending()) == interrupted
    wanted, other = (0, 1) if step in STEPS else (1, 0)
    assert checkpoint.has(host_state(wanted)) and not checkpoint.has(host_state(other)) and checkpoint.verify().ok
    checkpoint.save(host_state(2), threads=1)
    assert checkpoint.has(host_state(2)) and len(bucket.objects()) == 3
    assert not bucket.pending(), "parts of what the dead one uploaded cost money until somebody aborts it"


def test_uploads_of_a_save_that_began_later_are_not_aborted(checkpoint, bucket):
    """Uploads of a dead save are aborted. The later save may be alive, and would fail without its upload."""
    dead, later = (f"run/step-1/__0_0-{digit * 16}.distcp" for digit in "de")
    ended = dataclasses.replace(Holder.here(), started="1")
    bucket[f"run/step-1/lease-{'d' * 16}.json"] = ended.to_bytes()
    bucket.server.client.create_multipart_upload(Bucket=bucket.name, Key=dead)

    def another_begins(request, forward):
        bucket.server.client.create_multipart_upload(Bucket=bucket.name, Key=later)
        return forward()

    with bucket.server.failing(another_begins, STEPS["the commit"], times=1):
        checkpoint.save(host_state(0, 1))
    assert bucket.pending() == [later]


def test_all_processes_fail_if_one_upload_of_one_process_is_refused(checkpoint, bucket, tmp_path):
    url, options = checkpoint.url, checkpoint.options
    assert Saving(url, options, 0, world=2, rendezvous=str(tmp_path / "first")).said() == ["", ""]
    old = set(bucket.objects())
    with bucket.server.failing(refused, lambda r: r.name.startswith("__1_") and r.received > MIB) as met:
        said = Saving(url, options, 10, world=2, rendezvous=str(tmp_path / "second")).said()
    assert met and all("closed today" in text and "rank 1" in text for text in said), said
    assert old <= set(bucket.objects()) and not bucket.pending()
    state = {f"rank{rank}.{key}": value for rank in (0, 1) for key, value in host_state(rank).items()}
    assert checkpoint.has(state) and checkpoint.verify().ok
    assert Saving(url, options, 20, world=2, rendezvous=str(tmp_path / "third")).said() == ["", ""]
    state = {f"rank{rank}.{key}": value for rank in (0, 1) for key, value in host_state(20 + rank).items()}
    assert checkpoint.has(state) and not old & (set(bucket.objects()) - {"run/step-1/.metadata"})


# A server or a network with problems.


def test_requests_that_the_server_asks_to_slow_down_are_repeated(checkpoint, bucket):
    """The server asks twice for every request that s3fs repeats. The others are botocore's, which repeats none here."""
    seen = {}

    def twice(request):
        seen[request] = seen.get(request, 0) + 1
        return seen[request] <= 2 and not request.operation.startswith(("Head", "List"))

    state = host_state(0)
    with bucket.server.failing(slow_down, twice) as met:
        checkpoint.save(state, threads=1)
        assert checkpoint.has(state) and checkpoint.verify().ok
    assert {"PutObject", "UploadPart", "CompleteMultipartUpload", "GetObject"} <= set(count(met))
    assert not bucket.pending()


def test_the_error_has_the_servers_reason_if_it_always_asks_to_slow_down(checkpoint, bucket, monkeypatch):
    checkpoint.save(host_state(0, 1), threads=1)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    data = asks("PutObject", "*.distcp")
    with bucket.server.failing(slow_down, data) as met, pytest.raises(xc.CheckpointError, match="reduce your request"):
        checkpoint.save(host_state(1, 1), threads=1)
    assert met and checkpoint.has(host_state(0, 1))
    target = {"t0": torch.zeros(512, 1024, dtype=torch.int32)}
    data = asks("GetObject", "*.distcp")
    with bucket.server.failing(slow_down, data), pytest.raises(xc.CheckpointError, match="reduce your request"):
        checkpoint.load(target)
    assert not target["t0"].any()


def test_data_is_read_by_several_requests_at_a_time(checkpoint, bucket):
    """The server answers no request before another one has arrived."""
    state = host_state(0, 20)
    checkpoint.save(state, threads=1)
    together = Together(2)
    with bucket.server.failing(together, asks("GetObject", "*.distcp")):
        assert checkpoint.has(state)
    assert together.met.is_set()


def test_requests_that_are_never_answered_are_repeated(checkpoint, bucket):
    options = {**checkpoint.options, "config_kwargs": {**checkpoint.options["config_kwargs"], "read_timeout": 2}}
    impatient, state = Checkpoint(checkpoint.url, options), host_state(0)
    with bucket.server.failing(Hold(), asks("UploadPart"), times=1) as met:
        impatient.save(state, threads=1)
    assert met
    with bucket.server.failing(Hold(), asks("GetObject", "*.distcp"), times=1) as met:
        assert impatient.has(state)
    assert met and checkpoint.has(state)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("fault", [broken_before, broken_off, cut_short, bit_flipped])
def test_an_incomplete_or_garbled_answer_is_never_loaded(fault, verify, checkpoint, bucket, monkeypatch):
    """If it happens once, the request is repeated or the load fails. If it lasts, the load fails."""
    if fault is bit_flipped and not verify:
        pytest.skip("that is what verify=False means")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    state = host_state(0)
    checkpoint.save(state, threads=1)
    data = asks("GetObject", "*.distcp")
    with bucket.server.failing(fault, data, times=1) as met:
        try:
            assert checkpoint.has(state, verify=verify)
        except xc.CheckpointError:
            assert fault in (cut_short, bit_flipped), "a connection that broke once is worth another try"
    assert met
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with bucket.server.failing(fault, data), pytest.raises(xc.CheckpointError):
        checkpoint.load(target, verify=verify)
    assert all(not tensor.any() or same_bits(tensor, state[key]) for key, tensor in target.items())
    assert not all(tensor.any() for tensor in target.values())
    assert checkpoint.has(state, verify=verify)


@pytest.mark.parametrize(
    ("fault", "name"),
    [*itertools.product([cut_short, bit_flipped], [".metadata", "manifest-*", "*.distcp"]), (not_there, "*.distcp")],
)
def test_one_garbled_answer_is_not_reported_as_damage(fault, name, checkpoint, bucket, caplog):
    """Otherwise a restore would go back a step although the object is whole."""
    state = host_state(0)
    checkpoint.save(state, threads=1)
    garbled = asks("GetObject", name)
    with bucket.server.failing(fault, garbled, times=1) as met:
        assert checkpoint.has(state)
    if name == "*.distcp":  # s3fs checks the others by itself, and may have asked again before us
        assert len(met) == 1 and caplog.text.count("made a second time") == 1
    with bucket.server.failing(fault, garbled, times=1) as met:
        report = checkpoint.verify()
    assert met and report.ok, report
    if fault is not_there:
        assert caplog.text.count("made a second time") == 2  # by the load and by verify


def test_the_manager_restores_the_newest_step_despite_one_garbled_answer(bucket):
    url = f"s3://{bucket.name}/run"
    with xc.CheckpointManager(url, save_interval=1, storage_options=bucket.server.options) as manager:
        for step in (1, 2):
            manager.save(step, {"t": torch.full((1000,), float(step))})
    for fault in (cut_short, bit_flipped, not_there):
        target = {"t": torch.zeros(1000)}
        with xc.CheckpointManager(url, save_interval=1, storage_options=bucket.server.options) as manager:
            with bucket.server.failing(fault, asks("GetObject", "*.distcp"), times=1) as met:
                assert manager.restore_latest(target) == 2
            assert met and manager.all_steps() == [1, 2]
        assert target["t"].eq(2).all()


@pytest.mark.parametrize("name", [".metadata", "manifest-*", "*.distcp"])
@pytest.mark.parametrize("fault", [refused, slow_down, broken_before, broken_off, cut_short, bit_flipped])
def test_verify_raises_and_reports_no_damage_if_the_store_does_not_answer(fault, name, checkpoint, bucket, monkeypatch):
    """With cut_short and bit_flipped, s3fs itself raises, because it checks whole objects."""
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    checkpoint.save({"t": torch.ones(100)})
    what = "__0_0-.*distcp" if name == "*.distcp" else r"\.metadata( or the manifest)?"
    named = pytest.raises(xc.CheckpointError, match=rf"cannot verify s3://.*: reading {what} failed .*try again")
    with bucket.server.failing(fault, asks("GetObject", name)) as met, named:
        checkpoint.verify()
    assert met and checkpoint.verify().ok


@pytest.mark.parametrize("fault", [broken_before, broken_after])
@pytest.mark.parametrize("step", ["uploading a part", "the manifest", "the commit"])
def test_a_save_survives_a_connection_that_breaks_once(step, fault, checkpoint, bucket):
    checkpoint.save(host_state(0), threads=1)
    with bucket.server.failing(fault, STEPS[step], times=1) as met:
        checkpoint.save(host_state(1), threads=1)
    assert met and checkpoint.has(host_state(1)) and checkpoint.verify().ok
    assert len(bucket.objects()) == 3 and not bucket.pending()


def test_a_commit_without_an_answer_fails_the_save_and_is_not_undone(checkpoint, bucket, monkeypatch):
    """The save cannot know whether it was committed. If it was, its files must stay."""
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    checkpoint.save(host_state(0), threads=1)
    with bucket.server.failing(broken_after, STEPS["the commit"]) as met, pytest.raises(xc.CheckpointError):
        checkpoint.save(host_state(1), threads=1)
    assert met and checkpoint.verify().ok
    assert checkpoint.has(host_state(1))
    checkpoint.save(host_state(2), threads=1)
    assert checkpoint.has(host_state(2)) and len(bucket.objects()) == 3


# The number and size of requests.


def small(tensors):
    """A state of some tensors of 4 KiB, each in eight chunks, and as many objects."""
    on = mesh((8,))
    state = {f"t{n}": put(torch.full((64, 16), float(n)), on, ("a", None)) for n in range(tensors)}
    return {**state, **{f"o{n}": f"object {n}" for n in range(tensors)}}


def test_the_number_of_requests_does_not_depend_on_the_number_of_tensors(checkpoint, bucket):
    """540 chunks and objects take as many requests as 9."""
    counts = {}
    for tensors in (1, 60):
        state = small(tensors)
        checkpoint.save(state, threads=1)
        with bucket.server.recorded() as saving:
            checkpoint.save(state, threads=1)
        target = {key: put(torch.zeros(64, 16), mesh((8,)), (None, "a")) for key in state if key.startswith("t")}
        target |= {key: None for key in state if key.startswith("o")}
        with bucket.server.recorded() as loading:
            checkpoint.load(target, threads=1)
        for n in range(tensors):
            assert holds(target[f"t{n}"], torch.full((64, 16), float(n))) and target[f"o{n}"] == f"object {n}"
        with bucket.server.recorded() as verifying:
            assert checkpoint.verify().ok
        counts[tensors] = [count(requests) for requests in (saving, loading, verifying)]
        print(tensors, *map(dict, counts[tensors]))
    assert all(many.total() <= few.total() + 2 for few, many in zip(counts[1], counts[60]))
    saving, loading, verifying = counts[60]
    assert saving.total() <= 15 and loading.total() <= 8 and verifying.total() <= 10
    assert saving["ListObjects"] <= 4 and loading["ListObjects"] <= 1 and verifying["ListObjects"] <= 2


def test_large_reads_are_merged_and_no_byte_is_read_twice(checkpoint, bucket):
    state = host_state(0, 20)
    checkpoint.save(state, threads=1)
    size = len(bucket[one(bucket.objects(), ".distcp")])
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with bucket.server.recorded() as requests:
        report = checkpoint.load(target)
    data = stored(requests)
    print(len(data), sent(data) / size, report.bytes_read, report.bytes_needed)
    assert len(data) <= 2 + size // (4 * MIB)
    assert sent(data) <= size
    assert report.bytes_read == sent(data), "the report tells what was really read"
    ranges = sorted((request.start, request.stop) for request in data)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("verify", [True, False])
def test_loading_a_few_keys_does_not_read_the_whole_checkpoint(verify, checkpoint, bucket):
    state = host_state(0, 20)
    checkpoint.save(state, threads=1)
    wanted = {key: state[key] for key in ("t3", "t17")}
    with bucket.server.recorded() as requests:
        assert checkpoint.has(wanted, verify=verify)
    needed, data = sum(tensor.nbytes for tensor in wanted.values()), stored(requests)
    print(len(data), sent(data) / needed)
    # Checksums are those of whole blocks; at each end of a range one may be read for a few bytes.
    assert sent(data) <= (needed + 4 * len(wanted) * 4 * MIB if verify else 1.05 * needed)
    assert sent(data) < 0.6 * 20 * 2 * MIB and len(data) <= 4


@pytest.mark.parametrize("verify", [True, False])
def test_loading_columns_does_not_read_the_whole_tensor(verify, checkpoint, bucket):
    """The devices of one host hold the first columns of a tensor with long rows."""
    host = random_bits((2, 4 * MIB), torch.float32)
    checkpoint.save({"t": host}, threads=1)
    target = {"t": put(torch.zeros(2, 4 * MIB), mesh((8,)), (None, "a"))}
    reader = xc.ShardReader(checkpoint.url, storage_options=checkpoint.options, verify=verify)
    planner = xc.SPMDLoadPlanner(access=hosts.share_access(0, 4))
    with bucket.server.recorded() as requests:
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
    assert holds(target["t"], torch.cat([host[:, :MIB], torch.zeros(2, 3 * MIB)], dim=1))
    needed, data = host.nbytes // 4, stored(requests)
    print(len(data), sent(data) / needed)
    assert len(data) <= 4
    assert sent(data) <= (needed + 4 * 4 * MIB if verify else 1.05 * needed)


@pytest.mark.parametrize("verify", [True, False])
def test_narrow_columns_are_not_requested_row_by_row(verify, checkpoint, bucket):
    host = random_bits((2048, 1024), torch.float32)
    checkpoint.save({"t": host}, threads=1)
    target = {"t": put(torch.zeros(2048, 1024), mesh((8,)), (None, "a"))}
    planner = xc.SPMDLoadPlanner(access=hosts.share_access(1, 4))
    with bucket.server.recorded() as requests:
        reader = xc.ShardReader(checkpoint.url, storage_options=checkpoint.options, verify=verify)
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
    assert len(stored(requests)) <= 4 and sent(stored(requests)) <= host.nbytes + MIB
    expected = torch.zeros_like(host)
    expected[:, 256:512] = host[:, 256:512]
    assert holds(target["t"], expected)


# Another of fsspec's filesystems.


@pytest.fixture
def memory(tmp_path):
    url = f"memory:/{tmp_path}/step-1"
    yield Checkpoint(url, {})
    filesystem = fsspec.filesystem("memory")
    filesystem.rm(f"{tmp_path}", recursive=True)


def test_fsspecs_memory_is_saved_to_loaded_from_overwritten_and_verified(memory):
    filesystem, folder = fsspec.filesystem("memory"), memory.url.removeprefix("memory:/")
    saved = xla_hosts()
    memory.save(xla_state(mesh((4, 2)), saved))
    target = xla_state(mesh((2, 4)))
    memory.load(target)
    assert all(holds(target["model"][key], host) for key, host in saved.items()) and target["step"] == 7
    old = set(filesystem.ls(folder, detail=False))
    memory.save(host_state(1), threads=1)
    new = set(filesystem.ls(folder, detail=False))
    assert old & new == {f"{folder}/.metadata"} and len(new) == 3
    assert memory.has(host_state(1)) and memory.verify().ok
    key = one(new, ".distcp")
    data = bytearray(filesystem.cat_file(key))
    data[len(data) // 2] ^= 1
    filesystem.pipe_file(key, bytes(data))
    (damage,) = memory.verify().damages
    assert damage.file == key.rpartition("/")[2] and damage.start <= len(data) // 2 < damage.stop and damage.keys
    with pytest.raises(xc.CorruptCheckpointError):
        memory.has(host_state(1))
    filesystem.rm_file(key)
    assert not memory.verify().ok
    memory.save(host_state(2), threads=1)
    assert memory.has(host_state(2)) and memory.verify().ok

"""Checkpoints in an object store: a real S3 API on loopback that forgets, refuses, breaks off and slows down."""

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
    refused,
    slow_down,
)
from torch_xla_ckpt.storage.lease import Holder

pytestmark = pytest.mark.timeout(120)

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
class Place:
    """Where a checkpoint is, and how it is reached."""

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
def place(bucket):
    return Place(f"s3://{bucket.name}/run/step-1", bucket.server.options)


def one(keys, ending):
    (found,) = [key for key in keys if key.endswith(ending)]
    return found


def stored(requests):
    """Those that read data."""
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
def test_what_lies_in_s3_comes_back_on_another_mesh(threads, place, bucket):
    saved = xla_hosts()
    place.save(xla_state(mesh((4, 2), order=[3, 1, 4, 0, 5, 2, 6, 7]), saved), threads=threads)
    target = xla_state(mesh((2, 4)))
    report = place.load(target, threads=threads)
    for key, host in saved.items():
        assert holds(target["model"][key], host), key
    assert target["step"] == 7
    assert report.bytes_needed >= sum(host.nbytes for host in saved.values())
    assert not bucket.pending()


def test_a_url_is_all_that_save_and_load_need(bucket, monkeypatch):
    """Whoever has configured S3 for boto names no storage."""
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


def test_stock_pytorch_reads_from_s3_what_is_saved_there(place):
    saved = xla_hosts()
    place.save(xla_state(mesh((4, 2)), saved))
    target = {"model": {key: torch.zeros_like(host) for key, host in saved.items()}, "step": 0}
    dcp.load(target, storage_reader=FsspecReader(place.url, **place.options))
    assert all(same_bits(target["model"][key], host) for key, host in saved.items()) and target["step"] == 7


def test_what_stock_pytorch_saved_in_s3_is_loaded_and_then_replaced(place, bucket):
    saved = xla_hosts()
    dcp.save({"model": saved, "step": 7}, storage_writer=FsspecWriter(place.url, sync_files=False, **place.options))
    target = xla_state(mesh((2, 4)))
    place.load(target)
    assert all(holds(target["model"][key], host) for key, host in saved.items()) and target["step"] == 7
    before = set(bucket.objects())
    place.save(host_state(1, 1))
    assert place.has(host_state(1, 1))
    assert set(bucket.objects()) & before == {"run/step-1/.metadata"}


def test_a_place_without_a_checkpoint_or_without_a_bucket_is_named(place, bucket):
    with pytest.raises(xc.CheckpointError, match="no checkpoint"):
        place.load({"t": torch.zeros(1)})
    nowhere = Place("s3://no-such-bucket/run/step-1", place.options)
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
    """Later ranges begin behind the end, which S3 refuses and does not answer with nothing."""
    bucket[key] = bucket[key][: len(bucket[key]) // 2]


def emptied(bucket, key):
    bucket[key] = b""


def removed(bucket, key):
    del bucket[key]


@pytest.mark.parametrize("damage", [flipped, truncated, halved, emptied, removed])
def test_no_damaged_object_gets_by(damage, place, bucket):
    """Seen although s3fs has listed the folder before, and remembers."""
    state = host_state(0, 10)
    place.save(state, threads=1)
    assert place.verify().ok and place.has(state)
    key = one(bucket.objects(), ".distcp")
    damage(bucket, key)
    report = place.verify()
    assert not report.ok and {found.file for found in report.damages} == {key.rpartition("/")[2]}
    named = {name for found in report.damages for name in found.keys}
    assert named and named <= set(state)
    if damage is flipped:
        (found,) = report.damages
        assert found.start <= len(bucket[key]) // 2 < found.stop
    if damage in (emptied, removed):
        assert named == set(state)
    with pytest.raises(xc.CorruptCheckpointError, match=key.rpartition("/")[2]):
        place.has(state)


@pytest.mark.parametrize("damage", [flipped, truncated, halved, emptied, removed])
@pytest.mark.parametrize("ending", [".metadata", ".json"])
def test_no_damaged_head_gets_by(ending, damage, place, bucket):
    place.save(host_state(0, 1))
    key = one(bucket.objects(), ending)
    damage(bucket, key)
    with pytest.raises(xc.CheckpointError):
        place.has(host_state(0, 1))
    if (ending, damage) != (".metadata", removed):
        assert not place.verify().ok


# Replacing.


def test_a_save_over_another_leaves_only_its_own_objects(place, bucket):
    place.save(host_state(0), threads=1)
    old = set(bucket.objects())
    place.save(host_state(1), threads=1)
    new = set(bucket.objects())
    assert old & new == {"run/step-1/.metadata"} and len(new) == 3
    assert not bucket.pending()
    assert place.has(host_state(1)) and place.verify().ok


def test_a_save_touches_nothing_that_is_not_its_own(place, bucket):
    """Names that begin alike, what others put beside it, and what others are just uploading."""
    neighbour = Place(place.url + "0", place.options)
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
        place.save(host_state(seed))
    assert others <= set(bucket.objects()) and bucket.pending() == pending
    assert neighbour.has(host_state(5, 1)) and place.has(host_state(1))


def test_an_old_checkpoint_goes_only_when_the_new_one_is_there(place, bucket):
    """In the order of the server's own record: lease, data, manifest, .metadata, and then what is replaced."""
    place.save(host_state(0))
    old = set(bucket.objects())
    with bucket.server.recorded() as requests:
        place.save(host_state(1))
    writes = {"PutObject", "CopyObject", "CompleteMultipartUpload"}
    commits = [n for n, r in enumerate(requests) if r.operation in writes and r.name == ".metadata"]
    assert len(commits) == 1
    (commit,) = commits
    assert all(request.operation not in writes for request in requests[commit + 1 :])
    assert all("Delete" not in request.operation for request in requests[:commit])
    assert any("Delete" in request.operation for request in requests[commit:])
    written = [request.name for request in requests if request.operation in writes]
    assert written[0].startswith("lease-") and written[-2].startswith("manifest-")
    assert all(name.endswith(".distcp") for name in written[1:-2])
    assert not {request.key for request in requests if request.operation in writes} & (old - {"run/step-1/.metadata"})


def test_what_another_process_saved_meanwhile_is_what_is_loaded(place, bucket):
    """s3fs remembers what it has listed and how large it was, for as long as the process lives."""
    place.save(host_state(0), threads=1)
    assert place.has(host_state(0))
    assert Saving(place.url, place.options, seed=1).said() == [""]
    assert place.has(host_state(1)) and place.verify().ok
    place.save(host_state(2), threads=1)
    assert place.has(host_state(2)) and len(bucket.objects()) == 3


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
def test_a_save_that_is_refused_says_why_and_endangers_nothing(step, place, bucket):
    place.save(host_state(0), threads=1)
    old = {key: bucket[key] for key in bucket.objects()}
    with bucket.server.failing(refused, STEPS[step]) as met, pytest.raises(xc.CheckpointError, match="closed today"):
        place.save(host_state(1), threads=1)
    assert met and {key: bucket[key] for key in bucket.objects() if key in old} == old
    assert not bucket.pending(), "an upload that was given up costs money until somebody aborts it"
    assert place.has(host_state(0)) and place.verify().ok
    place.save(host_state(2), threads=1)
    assert place.has(host_state(2)) and len(bucket.objects()) == 3 and not bucket.pending()


def test_a_first_save_that_is_refused_leaves_nothing_that_loads(place, bucket):
    with bucket.server.failing(refused, asks("PutObject", ".metadata")), pytest.raises(xc.CheckpointError):
        place.save(host_state(1), threads=1)
    with pytest.raises(xc.CheckpointError, match="no checkpoint"):
        place.has(host_state(1))
    place.save(host_state(2), threads=1)
    assert place.has(host_state(2)) and len(bucket.objects()) == 3 and not bucket.pending()


def test_one_of_several_uploads_refused_fails_the_save(place, bucket):
    """DCP's own writer calls that a success."""
    place.save(host_state(0), threads=4)
    failing = bucket.server.failing(refused, lambda request: request.received > MIB, times=1)
    with failing as met, pytest.raises(xc.CheckpointError, match="closed today"):
        place.save(host_state(1), threads=4)
    assert met and place.has(host_state(0)) and not bucket.pending()


def test_old_objects_that_cannot_be_removed_do_not_fail_the_save(place, bucket, caplog):
    place.save(host_state(0), threads=1)
    with bucket.server.failing(refused, removes) as met, caplog.at_level(logging.WARNING):
        place.save(host_state(1), threads=1)
    assert met and "closed today" in caplog.text
    assert place.has(host_state(1))
    place.save(host_state(2), threads=1)
    assert place.has(host_state(2)) and len(bucket.objects()) == 3


@pytest.mark.parametrize("step", [*STEPS, "removing the old", "the end"])
def test_a_process_killed_while_it_saves_leaves_the_old_checkpoint_or_the_new_one(step, place, bucket):
    """SIGKILL before each kind of request is done, which is after the one before it; "the end" is after the last."""
    place.save(host_state(0), threads=1)
    hold = Hold(done=step == "the end")
    with bucket.server.failing(hold, STEPS.get(step, removes), times=1) as met:
        child = Saving(place.url, place.options, seed=1)
        try:
            assert hold.here.wait(60), child.said()
        finally:
            child.kill()
    interrupted = met[0].operation in ("UploadPart", "CompleteMultipartUpload")
    assert bool(bucket.pending()) == interrupted
    wanted, other = (0, 1) if step in STEPS else (1, 0)
    assert place.has(host_state(wanted)) and not place.has(host_state(other)) and place.verify().ok
    place.save(host_state(2), threads=1)
    assert place.has(host_state(2)) and len(bucket.objects()) == 3
    assert not bucket.pending(), "parts of what the dead one uploaded cost money until somebody aborts it"


def test_uploads_of_a_save_that_began_later_are_not_aborted(place, bucket):
    """Those of a dead save are; the later one is alive, and its save would fail."""
    dead, later = (f"run/step-1/__0_0-{digit * 16}.distcp" for digit in "de")
    ended = dataclasses.replace(Holder.here(), started="1")
    bucket[f"run/step-1/lease-{'d' * 16}.json"] = ended.to_bytes()
    bucket.server.client.create_multipart_upload(Bucket=bucket.name, Key=dead)

    def another_begins(request, forward):
        bucket.server.client.create_multipart_upload(Bucket=bucket.name, Key=later)
        return forward()

    with bucket.server.failing(another_begins, STEPS["the commit"], times=1):
        place.save(host_state(0, 1))
    assert bucket.pending() == [later]


def test_an_upload_refused_to_one_process_fails_all_of_them(place, bucket, tmp_path):
    url, options = place.url, place.options
    assert Saving(url, options, 0, world=2, rendezvous=str(tmp_path / "first")).said() == ["", ""]
    old = set(bucket.objects())
    with bucket.server.failing(refused, lambda r: r.name.startswith("__1_") and r.received > MIB) as met:
        said = Saving(url, options, 10, world=2, rendezvous=str(tmp_path / "second")).said()
    assert met and all("closed today" in text and "rank 1" in text for text in said), said
    assert old <= set(bucket.objects()) and not bucket.pending()
    state = {f"rank{rank}.{key}": value for rank in (0, 1) for key, value in host_state(rank).items()}
    assert place.has(state) and place.verify().ok
    assert Saving(url, options, 20, world=2, rendezvous=str(tmp_path / "third")).said() == ["", ""]
    state = {f"rank{rank}.{key}": value for rank in (0, 1) for key, value in host_state(20 + rank).items()}
    assert place.has(state) and not old & (set(bucket.objects()) - {"run/step-1/.metadata"})


# A bad day of the server's, or of the network between.


def test_a_server_that_asks_to_slow_down_loses_nothing(place, bucket):
    """Twice for every request, except those that s3fs leaves to botocore's own repeating, which is off here."""
    seen = {}

    def twice(request):
        seen[request] = seen.get(request, 0) + 1
        return seen[request] <= 2 and not request.operation.startswith(("Head", "List"))

    state = host_state(0)
    with bucket.server.failing(slow_down, twice) as met:
        place.save(state, threads=1)
        assert place.has(state) and place.verify().ok
    assert {"PutObject", "UploadPart", "CompleteMultipartUpload", "GetObject"} <= set(count(met))
    assert not bucket.pending()


def test_a_server_that_only_ever_asks_to_slow_down_is_named(place, bucket, monkeypatch):
    place.save(host_state(0, 1), threads=1)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    data = asks("PutObject", "*.distcp")
    with bucket.server.failing(slow_down, data) as met, pytest.raises(xc.CheckpointError, match="reduce your request"):
        place.save(host_state(1, 1), threads=1)
    assert met and place.has(host_state(0, 1))
    target = {"t0": torch.zeros(512, 1024, dtype=torch.int32)}
    data = asks("GetObject", "*.distcp")
    with bucket.server.failing(slow_down, data), pytest.raises(xc.CheckpointError, match="reduce your request"):
        place.load(target)
    assert not target["t0"].any()


def test_data_is_read_by_several_requests_at_a_time(place, bucket):
    """No request is answered before another one has come: one after the other would take their time until the end."""
    state = host_state(0, 20)
    place.save(state, threads=1)
    together = Together(2)
    with bucket.server.failing(together, asks("GetObject", "*.distcp")):
        assert place.has(state)
    assert together.met.is_set()


def test_requests_that_are_never_answered_are_made_again(place, bucket):
    options = {**place.options, "config_kwargs": {**place.options["config_kwargs"], "read_timeout": 2}}
    impatient, state = Place(place.url, options), host_state(0)
    with bucket.server.failing(Hold(), asks("UploadPart"), times=1) as met:
        impatient.save(state, threads=1)
    assert met
    with bucket.server.failing(Hold(), asks("GetObject", "*.distcp"), times=1) as met:
        assert impatient.has(state)
    assert met and place.has(state)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("fault", [broken_before, broken_off, cut_short, bit_flipped])
def test_an_answer_that_does_not_arrive_whole_is_never_taken_for_it(fault, verify, place, bucket, monkeypatch):
    """Once: repeated, or raised. For ever: raised, and the target is as it was."""
    if fault is bit_flipped and not verify:
        pytest.skip("that is what verify=False means")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    state = host_state(0)
    place.save(state, threads=1)
    data = asks("GetObject", "*.distcp")
    with bucket.server.failing(fault, data, times=1) as met:
        try:
            assert place.has(state, verify=verify)
        except xc.CheckpointError:
            assert fault in (cut_short, bit_flipped), "a connection that broke once is worth another try"
    assert met
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with bucket.server.failing(fault, data), pytest.raises(xc.CheckpointError):
        place.load(target, verify=verify)
    assert all(not tensor.any() or same_bits(tensor, state[key]) for key, tensor in target.items())
    assert not all(tensor.any() for tensor in target.values())
    assert place.has(state, verify=verify)


@pytest.mark.parametrize("name", [".metadata", "manifest-*", "*.distcp"])
@pytest.mark.parametrize("fault", [cut_short, bit_flipped])
def test_one_garbled_answer_does_not_make_a_checkpoint_damaged(fault, name, place, bucket, caplog):
    """Restoring would go back a step, and verify would report damage, although the object is as it was written."""
    state = host_state(0)
    place.save(state, threads=1)
    garbled = asks("GetObject", name)
    with bucket.server.failing(fault, garbled, times=1) as met:
        assert place.has(state)
    if name == "*.distcp":  # s3fs checks the others by itself, and may have asked again before us
        assert len(met) == 1 and caplog.text.count("made a second time") == 1
    with bucket.server.failing(fault, garbled, times=1) as met:
        report = place.verify()
    assert met and report.ok, report


def test_one_garbled_answer_does_not_make_the_manager_restore_an_older_step(bucket):
    url = f"s3://{bucket.name}/run"
    with xc.CheckpointManager(url, save_interval=1, storage_options=bucket.server.options) as manager:
        for step in (1, 2):
            manager.save(step, {"t": torch.full((1000,), float(step))})
    for fault in (cut_short, bit_flipped):
        target = {"t": torch.zeros(1000)}
        with xc.CheckpointManager(url, save_interval=1, storage_options=bucket.server.options) as manager:
            with bucket.server.failing(fault, asks("GetObject", "*.distcp"), times=1) as met:
                assert manager.restore_latest(target) == 2
            assert met and manager.all_steps() == [1, 2]
        assert target["t"].eq(2).all()


@pytest.mark.parametrize("name", [".metadata", "manifest-*", "*.distcp"])
@pytest.mark.parametrize("fault", [refused, slow_down, broken_before, broken_off, cut_short, bit_flipped])
def test_a_store_that_does_not_answer_verify_is_no_damage_and_is_named(fault, name, place, bucket, monkeypatch):
    """cut_short and bit_flipped: s3fs checks what it asks for as a whole."""
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    place.save({"t": torch.ones(100)})
    what = "__0_0-.*distcp" if name == "*.distcp" else r"\.metadata or the manifest"
    named = pytest.raises(xc.CheckpointError, match=rf"cannot verify s3://.*: reading {what} failed .*try again")
    with bucket.server.failing(fault, asks("GetObject", name)) as met, named:
        place.verify()
    assert met and place.verify().ok


@pytest.mark.parametrize("fault", [broken_before, broken_after])
@pytest.mark.parametrize("step", ["uploading a part", "the manifest", "the commit"])
def test_a_connection_lost_while_saving_is_taken_up_again(step, fault, place, bucket):
    place.save(host_state(0), threads=1)
    with bucket.server.failing(fault, STEPS[step], times=1) as met:
        place.save(host_state(1), threads=1)
    assert met and place.has(host_state(1)) and place.verify().ok
    assert len(bucket.objects()) == 3 and not bucket.pending()


def test_a_commit_whose_answer_never_came_may_have_happened_and_is_not_undone(place, bucket, monkeypatch):
    """The save fails, as it cannot know. What .metadata now names must still be there."""
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    place.save(host_state(0), threads=1)
    with bucket.server.failing(broken_after, STEPS["the commit"]) as met, pytest.raises(xc.CheckpointError):
        place.save(host_state(1), threads=1)
    assert met and place.verify().ok
    assert place.has(host_state(1))
    place.save(host_state(2), threads=1)
    assert place.has(host_state(2)) and len(bucket.objects()) == 3


# What it costs.


def small(tensors):
    """Tensors of 4 KiB in eight chunks each, and as many objects."""
    on = mesh((8,))
    state = {f"t{n}": put(torch.full((64, 16), float(n)), on, ("a", None)) for n in range(tensors)}
    return {**state, **{f"o{n}": f"object {n}" for n in range(tensors)}}


def test_requests_are_counted_in_bytes_and_not_in_tensors(place, bucket):
    """540 chunks and objects take what 9 take; nothing is asked for one by one, or listed again and again."""
    counts = {}
    for tensors in (1, 60):
        state = small(tensors)
        place.save(state, threads=1)
        with bucket.server.recorded() as saving:
            place.save(state, threads=1)
        target = {key: put(torch.zeros(64, 16), mesh((8,)), (None, "a")) for key in state if key.startswith("t")}
        target |= {key: None for key in state if key.startswith("o")}
        with bucket.server.recorded() as loading:
            place.load(target, threads=1)
        for n in range(tensors):
            assert holds(target[f"t{n}"], torch.full((64, 16), float(n))) and target[f"o{n}"] == f"object {n}"
        with bucket.server.recorded() as verifying:
            assert place.verify().ok
        counts[tensors] = [count(requests) for requests in (saving, loading, verifying)]
        print(tensors, *map(dict, counts[tensors]))
    assert all(many.total() <= few.total() + 2 for few, many in zip(counts[1], counts[60]))
    saving, loading, verifying = counts[60]
    assert saving.total() <= 15 and loading.total() <= 8 and verifying.total() <= 10
    assert saving["ListObjects"] <= 4 and loading["ListObjects"] <= 1 and verifying["ListObjects"] <= 2


def test_large_reads_are_merged_and_none_is_made_twice(place, bucket):
    state = host_state(0, 20)
    place.save(state, threads=1)
    size = len(bucket[one(bucket.objects(), ".distcp")])
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with bucket.server.recorded() as requests:
        report = place.load(target)
    data = stored(requests)
    print(len(data), sent(data) / size, report.bytes_read, report.bytes_needed)
    assert len(data) <= 2 + size // (4 * MIB)
    assert sent(data) <= size
    assert report.bytes_read == sent(data), "the report tells what was really read"
    ranges = sorted((request.start, request.stop) for request in data)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("verify", [True, False])
def test_a_few_keys_do_not_cost_the_whole_checkpoint(verify, place, bucket):
    state = host_state(0, 20)
    place.save(state, threads=1)
    wanted = {key: state[key] for key in ("t3", "t17")}
    with bucket.server.recorded() as requests:
        assert place.has(wanted, verify=verify)
    needed, data = sum(tensor.nbytes for tensor in wanted.values()), stored(requests)
    print(len(data), sent(data) / needed)
    # Checksums are those of whole blocks; at each end of a range one may be read for a few bytes.
    assert sent(data) <= (needed + 4 * len(wanted) * 4 * MIB if verify else 1.05 * needed)
    assert sent(data) < 0.6 * 20 * 2 * MIB and len(data) <= 4


@pytest.mark.parametrize("verify", [True, False])
def test_columns_do_not_cost_the_whole_tensor(verify, place, bucket):
    """A host whose devices hold the first columns of a tensor with long rows."""
    host = random_bits((2, 4 * MIB), torch.float32)
    place.save({"t": host}, threads=1)
    target = {"t": put(torch.zeros(2, 4 * MIB), mesh((8,)), (None, "a"))}
    reader = xc.ShardReader(place.url, storage_options=place.options, verify=verify)
    planner = xc.SPMDLoadPlanner(access=hosts.share_access(0, 4))
    with bucket.server.recorded() as requests:
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
    assert holds(target["t"], torch.cat([host[:, :MIB], torch.zeros(2, 3 * MIB)], dim=1))
    needed, data = host.nbytes // 4, stored(requests)
    print(len(data), sent(data) / needed)
    assert len(data) <= 4
    assert sent(data) <= (needed + 4 * 4 * MIB if verify else 1.05 * needed)


@pytest.mark.parametrize("verify", [True, False])
def test_narrow_columns_are_not_asked_for_row_by_row(verify, place, bucket):
    host = random_bits((2048, 1024), torch.float32)
    place.save({"t": host}, threads=1)
    target = {"t": put(torch.zeros(2048, 1024), mesh((8,)), (None, "a"))}
    planner = xc.SPMDLoadPlanner(access=hosts.share_access(1, 4))
    with bucket.server.recorded() as requests:
        reader = xc.ShardReader(place.url, storage_options=place.options, verify=verify)
        dcp.load(target, storage_reader=reader, planner=planner, no_dist=True)
    assert len(stored(requests)) <= 4 and sent(stored(requests)) <= host.nbytes + MIB
    expected = torch.zeros_like(host)
    expected[:, 256:512] = host[:, 256:512]
    assert holds(target["t"], expected)


# Another of fsspec's filesystems.


@pytest.fixture
def memory(tmp_path):
    url = f"memory:/{tmp_path}/step-1"
    yield Place(url, {})
    filesystem = fsspec.filesystem("memory")
    filesystem.rm(f"{tmp_path}", recursive=True)


def test_memory_is_saved_to_loaded_from_overwritten_and_verified(memory):
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

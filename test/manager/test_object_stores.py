"""A manager over object stores: refused requests, late answers, listings that lag, and the number of requests."""

import json
import re
import threading
from collections import Counter
from typing import ClassVar

import fsspec
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

import torch_xla_ckpt as xc
from support.runs import fill, newest, state
from support.s3 import Answer, Server, asks, broken_before, count, cut_short, not_there, refused, slow_down

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    with Server() as running:
        yield running


@pytest.fixture
def bucket(server, request):
    name = re.sub("[^a-z0-9]+", "-", request.node.name.lower())[:50].strip("-")
    with server.bucket(name) as made:
        yield made


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr("torch_xla_ckpt.manager.retries._PAUSE", 0.001)
    monkeypatch.setattr("torch_xla_ckpt.manager.retention._PAUSE", 0.001)


def manager(bucket, **options):
    options = {"chkpt_on_preemption": False, "storage_options": bucket.server.options, **options}
    return xc.CheckpointManager(f"s3://{bucket.name}/run", **options)


def events(bucket):
    return [json.loads(line) for line in bucket["run/journal.jsonl"].decode().splitlines()]


def numbers(bucket):
    return sorted({int(key.split("/")[1]) for key in bucket.objects() if key.split("/")[1].isdigit()})


class PerKey:
    """DeleteObjects that refuses single keys, as S3 does: the status is 200, and the answer names the refused keys."""

    def __init__(self, bucket, refuses):
        self._bucket, self._refuses = bucket, refuses

    def __call__(self, request, forward):
        body = forward.__closure__[[*forward.__code__.co_freevars].index("environ")].cell_contents["wsgi.input"].read()
        answer = ""
        for key in (found.decode() for found in re.findall(rb"<Key>(.*?)</Key>", body)):
            if self._refuses(key):
                answer += f"<Error><Key>{key}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
            else:
                del self._bucket[key]
                answer += f"<Deleted><Key>{key}</Key></Deleted>"
        xml = f"<?xml version='1.0'?><DeleteResult>{answer}</DeleteResult>".encode()
        return Answer("200 OK", [("Content-Type", "application/xml"), ("Content-Length", str(len(xml)))], xml)


# Errors of access


@pytest.mark.parametrize("fault", [slow_down, refused, broken_before], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("operation", ["HeadObject", "GetObject", "ListObjects"])
@pytest.mark.parametrize("times", [1, None], ids=["once", "always"])
def test_storage_error_never_makes_restore_latest_take_an_older_step(server, bucket, fault, operation, times):
    fill(manager(bucket), 100, 200, 300)
    with manager(bucket, max_to_keep=2) as reading:
        where = (
            (lambda r: r.operation == operation)
            if operation == "ListObjects"
            else (lambda r: r.operation == operation and "/300/" in r.key and not r.key.endswith(".distcp"))
        )
        with server.failing(fault, where, times) as met:
            try:
                assert newest(reading) == 300
            except xc.CheckpointError as error:
                assert times is None and str(bucket.name) in str(error)
            else:
                assert times == 1 or fault is broken_before
        assert met
        assert reading.all_steps() == [100, 200, 300] and not reading._run.steps.damaged
        assert newest(reading) == 300


def test_answer_cut_short_once_does_not_count_as_damage(server, bucket):
    fill(manager(bucket), 1, 2)
    for name in (".metadata", "manifest-*"):
        with manager(bucket) as reading, server.failing(cut_short, asks("GetObject", name), 1) as met:
            assert newest(reading) == 2 and not reading._run.steps.damaged
        assert met


# Deletions


@pytest.mark.parametrize("how", ["per key", "request"])
def test_denied_deletions_are_tried_three_times_and_again_after_the_next_save(server, bucket, how, caplog):
    fault, where = (
        (PerKey(bucket, lambda key: "/run/" in f"/{key}"), asks("DeleteObjects"))
        if how == "per key"
        else (refused, lambda request: request.operation in ("DeleteObjects", "DeleteObject"))
    )
    with manager(bucket, max_to_keep=1) as saving:
        with server.failing(fault, where):
            saving.save(0, state(0), force=True)
            saving.save(1, state(1), force=True)
            saving.wait()
        for attempt in (1, 2, 3):
            assert f"step 0 could not be deleted (attempt {attempt} of 3)" in caplog.text
        assert saving.all_steps() == [0, 1]  # it is whole, so it is still a step
        told = [(one["event"], one["step"]) for one in events(bucket)]
        assert told == [("saved", 0), ("saved", 1), ("failed to delete", 0)]
        saving.restore(0, state(-1))
        saving.save(2, state(2), force=True)
        saving.wait()
        assert saving.all_steps() == numbers(bucket) == [2]
        assert {one["step"] for one in events(bucket) if one["event"] == "deleted"} == {0, 1}


def test_files_that_cannot_be_deleted_are_reported_and_deleted_after_the_next_save(server, bucket, caplog):
    with manager(bucket, max_to_keep=1) as saving:
        saving.save(0, state(0), force=True)
        with server.failing(PerKey(bucket, lambda key: key.endswith(".distcp")), asks("DeleteObjects")):
            saving.save(1, state(1), force=True)
            saving.wait()
        assert saving.all_steps() == [1] and numbers(bucket) == [0, 1]
        assert "the store kept 1 of" in caplog.text and "attempt 3 of 3" in caplog.text
        assert "was not written by a checkpoint manager" not in caplog.text
        saving.save(2, state(2), force=True)
        saving.wait()
        assert numbers(bucket) == [2] and [one["event"] for one in events(bucket)].count("failed to delete") == 1


def test_next_program_deletes_what_a_dead_program_could_not_delete(server, bucket):
    with (
        server.failing(PerKey(bucket, lambda key: key.endswith(".distcp")), asks("DeleteObjects")),
        manager(bucket, max_to_keep=1) as saving,
    ):
        saving.save(0, state(0), force=True)
        saving.save(1, state(1), force=True)
    assert numbers(bucket) == [0, 1]
    fill(manager(bucket), 2)
    assert numbers(bucket) == [1, 2]


def test_bucket_without_permission_to_delete_can_save_and_restore(server, bucket, caplog):
    with (
        server.failing(refused, lambda request: request.operation in ("DeleteObjects", "DeleteObject")),
        manager(bucket) as saving,
    ):
        assert "could not be deleted" in caplog.text
        saving.save(1, state(1), force=True)
        assert newest(saving) == 1


# The journal


@pytest.mark.parametrize(
    ("fault", "operation"),
    [(broken_before, "GetObject"), (slow_down, "GetObject"), (refused, "PutObject"), (cut_short, "GetObject")],
)
def test_journal_loses_no_save_while_it_cannot_be_read_or_written(server, bucket, fault, operation):
    with manager(bucket) as saving:
        saving.save(0, state(0), force=True)
        saving.wait()
        times = 1 if fault is cut_short else 6
        with server.failing(fault, asks(operation, "journal.jsonl"), times):
            saving.save(1, state(1), force=True)
            saving.wait()
        saving.save(2, state(2), force=True)
        saving.wait()
        assert [one.step for one in saving.history()] == [0, 1, 2]


@pytest.mark.parametrize("fault", [cut_short, not_there])
def test_next_program_keeps_the_journal_although_an_answer_is_garbled(server, bucket, fault):
    fill(manager(bucket), 0, 1)
    with manager(bucket) as saving:
        saving.all_steps()
        with server.failing(fault, asks("GetObject", "journal.jsonl"), 1) as met:
            saving.save(2, state(2), force=True)
            saving.wait()
        assert met and [one.step for one in saving.history()] == [0, 1, 2]


# Listings that lag


class Lagging(MemoryFileSystem):
    """A store whose listings lack objects that are younger than ``lag`` listings of their folder."""

    protocol = "lagging"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    cachable = False
    lag = 0
    seen: ClassVar[Counter] = Counter()

    def ls(self, path, detail=True, **options):
        found = []
        for entry in super().ls(path, detail=True, **options):
            if entry["type"] == "file":
                type(self).seen[entry["name"]] += 1
                if self.seen[entry["name"]] <= self.lag and entry["name"].endswith(".metadata"):
                    continue
            found.append(entry)
        return found if detail else [entry["name"] for entry in found]


@pytest.fixture
def lagging(monkeypatch):
    entry = {"class": f"{__name__}.Lagging"}
    monkeypatch.setitem(known_implementations, "lagging", entry)
    fsspec.register_implementation("lagging", Lagging, clobber=True)
    Lagging.store.clear()
    Lagging.pseudo_dirs[:] = [""]
    Lagging.seen.clear()
    yield Lagging
    Lagging.lag = 0


@pytest.mark.parametrize("lag", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("most", [0, 1])
def test_committed_step_that_listings_do_not_show_yet_is_not_deleted(lagging, lag, most):
    lagging.lag = lag
    options = {"chkpt_on_preemption": False, "max_to_keep": most}
    expected = [2] if most else [0, 1, 2]
    with xc.CheckpointManager("lagging://r/run", **options) as saving:
        for step in range(3):
            saving.save(step, state(step), force=True)
            saving.wait()
        assert saving.all_steps() == expected and newest(saving) == 2
    with xc.CheckpointManager("lagging://r/run", **options) as again:
        again.save(3, state(3), force=True)
        again.wait()
        assert newest(again) == 3
        assert again.all_steps() == ([3] if most else [0, 1, 2, 3])


# Number of requests


class Counting(MemoryFileSystem):
    """A store in memory that counts requests."""

    protocol = "counting"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    cachable = False
    asked: ClassVar[Counter] = Counter()
    _lock = threading.Lock()

    def info(self, path, **options):
        with self._lock:
            self.asked["info"] += 1
        file = self.store.get(self._strip_protocol(path))  # without looking at all files, as the base class does
        if file is None:
            raise FileNotFoundError(path)
        return {"name": path, "size": file.size, "type": "file"}


def counted(name):
    real = getattr(MemoryFileSystem, name)

    def call(self, *args, **kwargs):
        with Counting._lock:
            Counting.asked[name] += 1
        return real(self, *args, **kwargs)

    return call


for _name in ("ls", "cat_file", "pipe_file", "_open", "rm_file", "cat_ranges"):
    setattr(Counting, _name, counted(_name))


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setitem(known_implementations, "counting", {"class": f"{__name__}.Counting"})
    fsspec.register_implementation("counting", Counting, clobber=True)
    Counting.store.clear()
    Counting.pseudo_dirs[:] = [""]
    return Counting


@pytest.mark.parametrize("keep", [xc.keep.All(), xc.keep.Latest(10_000), xc.keep.Latest(10_000) | xc.keep.Every(1)])
def test_save_into_a_run_of_5000_steps_makes_no_more_requests_than_into_a_new_run(counting, keep):
    def asked(url, steps):
        with xc.CheckpointManager(url, keep=keep, chkpt_on_preemption=False) as saving:
            for step in steps:
                counting.asked.clear()
                saving.save(step, state(step), force=True)
                saving.wait()
            spent = sum(counting.asked.values())
            assert len(saving.all_steps()) == step + 1
        return spent

    few = asked("counting://r/few", range(3))
    with xc.CheckpointManager("counting://r/run", chkpt_on_preemption=False) as saving:
        saving.save(0, state(0), force=True)
    one = {name: file for name, file in counting.store.items() if "/run/0/" in name}
    assert len(one) == 3
    for step in range(1, 5000):
        counting.store.update({name.replace("/run/0/", f"/run/{step}/"): file for name, file in one.items()})
    assert asked("counting://r/run", range(5000, 5003)) <= few


def test_number_of_s3_requests_does_not_grow_with_the_number_of_steps(server, bucket):
    fill(manager(bucket), 0)
    for key in bucket.objects():
        if key.startswith("run/0/"):
            for step in range(1, 60):
                bucket[key.replace("run/0/", f"run/{step}/")] = bucket[key]

    def spent(action):
        with server.recorded() as log:
            action()
        return count(log)

    made = []
    assert sum(spent(lambda: made.append(manager(bucket, keep=xc.keep.All()))).values()) <= 6
    with made[0] as saving:
        assert sum(spent(saving.latest_step).values()) <= 3
        saving.save(60, state(60), force=True)  # which looks once at folders that the journal does not know
        saving.wait()
        for step in (61, 62):
            asked = spent(lambda step=step: (saving.save(step, state(step), force=True), saving.wait()))
            # The step's folder is listed when its save begins, and right before it commits.
            assert sum(asked.values()) <= 10 and asked["ListObjects"] <= 2
        assert spent(saving.all_steps)["ListObjects"] == 1 and saving.all_steps() == list(range(63))
        assert sum(spent(saving.all_steps).values()) == 1  # all is known by now
        assert spent(lambda: newest(saving))["ListObjects"] <= 2
    # The next program believes the journal where no step was ever deleted, and looks in the background.
    with manager(bucket, keep=xc.keep.Latest(100)) as saving:
        assert saving.save(63, state(63), force=True)
        saving.wait()
        assert saving.all_steps() == list(range(64))


def test_manifests_are_read_once_and_only_for_policies_that_need_them(server, bucket):
    fill(manager(bucket), *range(6))
    reads = asks("GetObject", "manifest-*")
    for keep, expected in ((xc.keep.Every(steps=1), 0), (xc.keep.Best(10, "loss") | xc.keep.Every(hours=0.1), 6)):
        with manager(bucket, keep=keep) as saving, server.recorded() as log:
            saving.save(6, state(6), force=True)
            saving.wait()
            before = len([one for one in log if reads(one) and "/6/" not in one.key])
            saving.save(7, state(7), force=True)
            saving.wait()
            after = len([one for one in log if reads(one) and one.key.split("/")[1] in "012345"])
        assert before <= expected and after <= expected
        for key in bucket.objects():
            if key.split("/")[1] in ("6", "7"):
                del bucket[key]

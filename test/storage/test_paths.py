"""A path has one meaning everywhere, and keeps it from the moment it is passed."""

import os
import threading
import uuid
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import example, given, settings
from hypothesis import strategies as st

import torch_xla_ckpt as xc
from support.s3 import Hold, Server, asks
from torch_xla_ckpt.protocols import Window
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import Location

pytestmark = pytest.mark.slow

ODD = "*?[]{}()!^$#%&;:@,=+~'\"|<>\\ -_.aé日\u202e"
# A component of a path. Not "." or "..", which have a meaning of their own.
components = st.text(ODD, min_size=1, max_size=8).filter(lambda text: text.strip(". ") != "")
patterns = [("lr[1]", "lr1"), ("lr*", "lr10"), ("lr?", "lr2"), ("{a,b}", "a"), ("a::b", "a"), ("a%20b", "a b")]


def state(value):
    return {"t": torch.full((4,), float(value))}


def value_at(path, options=None):
    found = state(0)
    xc.load(found, storage_reader=xc.ShardReader(path, storage_options=options))
    return float(found["t"][0])


@pytest.fixture(scope="module")
def s3():
    with Server() as server, server.bucket("odd-paths") as bucket:
        yield bucket


def check_runs_stay_apart(root, options, names):
    """Make a run that keeps one step under each name, and check that every run has its own last step in the end."""
    names = list(dict.fromkeys(names))
    for number, name in enumerate(names, 1):
        with xc.CheckpointManager(
            f"{root}/{name}", max_to_keep=1, chkpt_on_preemption=False, storage_options=options, sync=False
        ) as manager:
            for step in (1, 2):
                manager.save(step, state(number * 10 + step), force=True)
            manager.wait()
            assert manager.all_steps() == [2]
    for number, name in enumerate(names, 1):
        assert value_at(f"{root}/{name}/2", options) == number * 10 + 2, name
        assert xc.verify(f"{root}/{name}/2", storage_options=options).ok


@settings(max_examples=15)
@given(names=st.lists(components, min_size=1, max_size=3))
@example(names=[name for pair in patterns for name in pair])
def test_names_of_local_folders_are_taken_literally(tmp_path_factory, names):
    check_runs_stay_apart(tmp_path_factory.mktemp("paths"), None, names)


@settings(max_examples=15)
@given(names=st.lists(components, min_size=1, max_size=3))
@example(names=[name for pair in patterns for name in pair])
def test_names_in_memory_urls_are_taken_literally(names):
    check_runs_stay_apart(f"memory://{uuid.uuid4().hex}", None, names)


@settings(max_examples=5)
@given(names=st.lists(components, min_size=1, max_size=2))
@example(names=[name for pair in patterns for name in pair])
def test_names_in_s3_urls_are_taken_literally(s3, names):
    check_runs_stay_apart(f"s3://{s3.name}/{uuid.uuid4().hex}", s3.server.options, names)


@pytest.mark.parametrize("kind", ["local", "memory", "s3"])
@pytest.mark.parametrize("name", ["a[1]", "*", "?", "a b", "a%20b", "a#b", "{x}", "é日"])
def test_every_folder_operation_takes_file_names_literally(tmp_path, s3, kind, name):
    """Files that the name would match as a pattern are never touched."""
    path = {"local": tmp_path, "memory": f"memory://{uuid.uuid4().hex}", "s3": f"s3://{s3.name}/{uuid.uuid4().hex}"}
    folder = open_folder(Location.of(path[kind], s3.server.options if kind == "s3" else None))
    folder.make()
    others = {"a1": b"one", "b": b"two", "a": b"three"}
    for other, data in others.items():
        folder.put(other, data)
    folder.put(name, b"first")
    folder.append(name, b"line")
    assert folder.read(name) == b"first\nline\n"
    version = folder.version(name)
    folder.replace(name, [b"replaced"], "temporary", expected=version)
    assert folder.size(name) == 8 and folder.missing({name: 8, "absent": 1}) == ["absent"]
    (view,) = folder.view([Window(name, 2, 6, ((2, 6),))])
    assert bytes(view) == b"plac"
    folder.release()
    sink = folder.create(name + "2")
    sink.write(b"x")
    sink.close()
    assert set(folder.names()) == {name, name + "2", *others} and not folder.folders()
    folder.remove([name, name + "2", "absent"])
    assert {other: folder.read(other) for other in folder.names()} == others


# Local paths.


@pytest.mark.parametrize("inner", ["run::1/c", "c://d", "s3::x", "memory::y/z", "a::b::c", "~x/c", "x;y", "%41"])
def test_local_paths_with_url_syntax_inside_are_local_paths(tmp_path, inner):
    xc.save(state(1), f"{tmp_path}/{inner}")
    assert (tmp_path / inner / ".metadata").exists()
    assert value_at(f"{tmp_path}/{inner}") == 1
    with xc.CheckpointManager(f"{tmp_path}/run/{inner}", save_interval=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        assert manager.all_steps() == [1, 2, 3]


def test_urls_with_a_typo_are_local_paths_and_a_warning_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    xc.save(state(1), "s4://bucket/run")
    assert (tmp_path / "s4:" / "bucket" / "run" / ".metadata").exists()
    assert "knows no protocol 's4'" in caplog.text
    xc.save(state(2), Path("memory://bucket/run"))
    assert (tmp_path / "memory:" / "bucket" / "run" / ".metadata").exists()
    assert "a URL has '//' after its protocol" in caplog.text


def test_home_and_relative_paths_are_resolved_when_they_are_passed(tmp_path, monkeypatch):
    home, one, two = (tmp_path / name for name in ("home", "one", "two"))
    for folder in (home, one, two):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(one)
    for path, place in (("~/run", home / "run"), ("relative", one / "relative"), (Path("~/path"), home / "path")):
        monkeypatch.chdir(one)
        with xc.CheckpointManager(path, save_interval=1, initial_path="elsewhere") as manager:
            manager.save(1, state(1))
            monkeypatch.chdir(two)
            manager.save(2, state(2))
            manager.save_async(3, state(3))
            manager.wait()
            found = state(0)
            assert manager.all_steps() == [1, 2, 3] and manager.restore_latest(found) == 3
            assert found["t"].eq(3).all()
        assert sorted(name for name in os.listdir(place) if name.isdigit()) == ["1", "2", "3"]
    assert not os.listdir(two)


@pytest.mark.parametrize("way", ["xc", "dcp"])
def test_an_async_save_keeps_its_relative_path_after_chdir(tmp_path, monkeypatch, way):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    monkeypatch.chdir(one)
    held = threading.Event()

    class Slow(xc.ShardWriter):
        def prepare_local_plan(self, plan):
            held.wait(60)
            return super().prepare_local_plan(plan)

    with xc.SPMDStager() as stager:
        if way == "xc":
            handle = xc.async_save(state(1), stager=stager, storage_writer=Slow("c"))
        else:
            handle = dcp.async_save(
                state(1), storage_writer=Slow("c"), planner=xc.SPMDSavePlanner(), async_stager=stager
            )
        monkeypatch.chdir(two)
        held.set()
        (
            handle if way == "xc" else handle.upload_completion if hasattr(handle, "upload_completion") else handle
        ).result()
    assert value_at(one / "c") == 1 and not os.listdir(two)


def test_reports_and_readers_keep_their_relative_path_after_chdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    xc.save(state(1), "c")
    reader = xc.ShardReader("c")
    report = xc.verify("c")
    monkeypatch.chdir("/")
    assert report.path == str(tmp_path / "c")
    found = state(0)
    xc.load(found, storage_reader=reader)
    assert found["t"].eq(1).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda path: xc.save(state(1), path),
        lambda path: xc.load(state(1), path),
        lambda path: xc.verify(path),
        lambda path: xc.CheckpointManager(path),
        lambda path: xc.ShardWriter(path),
        lambda path: xc.ShardReader(path),
        lambda path: xc.restore(path, state=state(1)),
    ],
)
@pytest.mark.parametrize("path", ["", "file://", "a\0b", "s3://"])
def test_empty_and_impossible_paths_are_refused(call, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"empty|null|no bucket"):
        call(path)
    assert not os.listdir(tmp_path)


def test_spellings_of_one_path_have_one_identity(tmp_path, monkeypatch):
    """Otherwise saves to one folder would not wait for each other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    ways = ["real", "./real", "link", "link/../real", f"{tmp_path}/real/", f"file://{tmp_path}/real"]
    assert len({Location.of(way).identity for way in ways}) == 1
    (tmp_path / "other" / "deep").mkdir(parents=True)
    (tmp_path / "away").symlink_to("other/deep")
    assert Location.of("away/../x").path == str(tmp_path / "other" / "x"), "a link before .. leads elsewhere"


def test_chained_urls_mean_what_they_mean_to_fsspec(tmp_path):
    inner = f"memory://{uuid.uuid4().hex}/c"
    xc.save(state(1), inner)
    cached = f"simplecache::{inner}"
    assert Location.of(cached).filesystem.protocol == "simplecache"
    assert value_at(cached) == 1


# Time limits.


class Stuck(MemoryFileSystem):
    """A memory filesystem in which one operation gets no answer from some moment on."""

    protocol = "stuck"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False
    on = None
    free = threading.Event()
    late = threading.Event()  # a request that waited was carried out

    def _wait(self, operation):
        if Stuck.on == operation:
            Stuck.free.wait(60)

    def ls(self, path, detail=True, **kwargs):
        self._wait("ls")
        return super().ls(path, detail=detail, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        self._wait("pipe_file")
        self._wait(f"put {path.rpartition('/')[2]}")
        super().pipe_file(path, value, **kwargs)
        self._carried_out(path)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._wait("cat_file")
        return super().cat_file(path, start=start, end=end, **kwargs)

    def rm_file(self, path):
        self._wait("rm_file")
        super().rm_file(path)
        self._carried_out(path)

    def _carried_out(self, path):
        if Stuck.free.is_set() and path.endswith(".metadata"):
            Stuck.late.set()

    def _open(self, path, mode="rb", **kwargs):
        self._wait("open")
        return super()._open(path, mode, **kwargs)


@pytest.fixture
def stuck():
    fsspec.register_implementation("stuck", Stuck, clobber=True)
    Stuck.on, Stuck.free, Stuck.late = None, threading.Event(), threading.Event()
    yield f"stuck://{uuid.uuid4().hex}/c"
    Stuck.on = None
    Stuck.free.set()


@pytest.mark.parametrize("operation", ["ls", "pipe_file", "cat_file", "open"])
def test_a_save_to_a_store_that_never_answers_fails_and_names_the_store(stuck, operation):
    xc.save(state(1), stuck)
    Stuck.on = operation
    with pytest.raises(xc.CheckpointError, match=r"stuck://.*no answer within") as caught:
        xc.save(state(2), storage_writer=xc.ShardWriter(stuck, request_timeout=0.2))
    assert "request_timeout=" in str(caught.value)
    Stuck.on = None
    assert value_at(stuck) == 1


@pytest.mark.parametrize("operation", ["put .metadata", "rm_file"])
def test_a_request_that_timed_out_cannot_destroy_a_later_save(stuck, operation):
    """The store may carry out such a request at any later time."""
    xc.save(state(1), stuck)
    Stuck.on = operation
    if operation == "rm_file":  # as retention deletes a step
        folder = open_folder(Location.of(stuck, request_timeout=0.2))
        with pytest.raises(OSError, match="no answer within"):
            folder.remove([".metadata"])
    else:
        with pytest.raises(xc.CheckpointError, match="no answer within"):
            xc.save(state(2), storage_writer=xc.ShardWriter(stuck, request_timeout=0.2))
    Stuck.on = None
    with pytest.raises(xc.CheckpointError, match=r"stuck://.*an earlier request .*\.metadata got no answer, and still"):
        xc.save(state(3), storage_writer=xc.ShardWriter(stuck, request_timeout=0.2))
    assert value_at(stuck) == 1
    Stuck.free.set()
    xc.save(state(3), stuck)
    assert Stuck.late.is_set(), "the save did not wait"
    assert value_at(stuck) == 3 and xc.verify(stuck).ok


def test_a_save_ends_although_the_store_never_removes_old_files(stuck, caplog):
    xc.save(state(1), stuck)
    Stuck.on = "rm_file"
    xc.save(state(2), storage_writer=xc.ShardWriter(stuck, request_timeout=0.2))
    assert "could not be removed" in caplog.text and "no answer within" in caplog.text
    Stuck.on = None
    assert value_at(stuck) == 2


def test_a_load_from_a_store_that_never_answers_fails_and_names_the_store(stuck):
    xc.save(state(1), stuck)
    Stuck.on = "cat_file"
    with pytest.raises(xc.CheckpointError, match=r"stuck://.*no answer within"):
        xc.load(state(0), storage_reader=xc.ShardReader(stuck, request_timeout=0.2))


def test_a_manager_names_a_store_that_never_answers(stuck):
    with xc.CheckpointManager(stuck, chkpt_on_preemption=False, request_timeout=0.2) as manager:
        manager.save(1, state(1), force=True)
        Stuck.on = "ls"
        with pytest.raises(xc.CheckpointError, match=r"stuck://.*no answer within"):
            manager.all_steps()
        Stuck.on = None
        assert manager.all_steps() == [1]


def test_a_save_to_s3_that_never_answers_fails(s3):
    url, options = f"s3://{s3.name}/{uuid.uuid4().hex}", s3.server.options
    writer = xc.ShardWriter(url, storage_options=options, request_timeout=0.5)
    with s3.server.failing(Hold(), asks("PutObject", "*.distcp")), pytest.raises(xc.CheckpointError, match="no answer"):
        xc.save(state(1), storage_writer=writer)


@pytest.mark.parametrize("to", ["gone", "loop", "file"])
def test_save_to_a_link_that_leads_to_no_folder_names_the_link_and_changes_nothing(tmp_path, to):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(to)
    with pytest.raises(xc.CheckpointError, match=rf"loop is a link to {to}, which is no folder.*remove the link"):
        xc.save({"n": 1}, tmp_path / "loop")
    with xc.SPMDStager("host") as stager, pytest.raises(xc.CheckpointError, match=rf"loop is a link to {to}"):
        xc.async_save({"n": 1}, tmp_path / "loop", stager=stager).result(60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "disk").mkdir()
    (tmp_path / "linked").symlink_to("disk")
    xc.save({"n": 1}, tmp_path / "linked")
    assert (tmp_path / "linked").is_symlink() and (tmp_path / "disk" / ".metadata").exists()

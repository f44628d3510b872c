"""The order of a save's requests to a store: short, and safe wherever the program or a request breaks off.

A program that is killed leaves the objects that the store has at that moment. So the store's objects are recorded after
every change that a save makes. In each of these states, the old checkpoint or the new one must be whole.
"""

import asyncio
import functools
import random
import threading

import pytest
import torch

import torch_xla_ckpt as xc
from support.meshes import random_bits, same_bits
from support.simulated_store import REFUSED, SLOW_DOWN, Fault, SimulatedFileSystem, Store, asks, count
from torch_xla_ckpt.storage import retries
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import Location

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RUN = "run/step-1"
OLD, NEW, NEXT = 1, 2, 3


@pytest.fixture
def store():
    with Store() as store:
        yield store


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(retries, "LONGEST_PAUSE", 0.002)


@functools.cache
def state(number):
    """Tensors of 2 MiB: three data files, which are put at the same time."""
    return {f"t{n}": random_bits((512, 1024), torch.float32, 100 * number + n) for n in range(10)}


def save(store, number, **options):
    writer = xc.ShardWriter(store.url(RUN), storage_options=store.options, **options)
    return xc.save(state(number), storage_writer=writer)


def held(store):
    """Return the number of the state that a store holds; None if it holds no checkpoint."""
    target = {key: torch.zeros_like(tensor) for key, tensor in state(OLD).items()}
    try:
        xc.load(target, store.url(RUN), storage_options=store.options)
    except xc.CheckpointError as error:
        assert "no checkpoint" in str(error), error
        return None
    (number,) = [n for n in (OLD, NEW, NEXT) if all(same_bits(target[k], v) for k, v in state(n).items())]
    return number


def data_names(names):
    return {name for name in names if name.endswith(".distcp")}


class States:
    """Every state that a store has during a save, in order. Requests take random times, so that their order varies."""

    def __init__(self, store, seed):
        self.found = []
        self._store = store
        self._is_putting = False
        self._random = random.Random(seed)
        self._request, self._put, self._drop = store.request, store.put, store.drop

    def __enter__(self):
        self._store.request, self._store.put, self._store.drop = self.request, self.put, self.drop
        self._store._shares = True  # memory of removed objects must not be used again
        return self

    def __exit__(self, *_):
        self._store.request, self._store.put, self._store.drop = self._request, self._put, self._drop

    async def request(self, *arguments):
        await asyncio.sleep(self._random.uniform(0, 0.01))
        return await self._request(*arguments)

    def put(self, path, data):
        self._is_putting = True
        self._put(path, data)
        self._is_putting = False
        self.found.append(dict(self._store.objects))

    def drop(self, path):
        was_there = self._drop(path)
        if not self._is_putting:  # a put replaces an object in one step
            self.found.append(dict(self._store.objects))
        return was_there


@pytest.fixture
def crashed():
    """Return a store with given objects, as the next program finds it."""
    stores = []

    def crashed(objects):
        with_objects = Store()
        stores.append(with_objects)
        with_objects.__enter__()
        with_objects.objects = dict(objects)
        with_objects.modified = dict.fromkeys(objects, 0.0)
        with_objects._shares = True
        return with_objects

    yield crashed
    for one in stores:
        one.__exit__()


@pytest.mark.parametrize("old", [None, OLD], ids=["first save", "over an old checkpoint"])
@pytest.mark.parametrize("seed", range(2))
def test_a_program_killed_at_any_request_leaves_the_old_checkpoint_or_the_new_one(store, crashed, old, seed):
    if old is not None:
        save(store, OLD)
    with States(store, seed) as states:
        save(store, NEW)
    assert len(states.found) >= 6
    seen = []
    for objects in states.found:
        after = crashed(objects)
        seen.append(held(after))
        expected = NEW if any(name == ".metadata" and new_metadata(after, store) for name in after.names(RUN)) else old
        assert seen[-1] == expected
        if len(seen) % 3 == 0 or objects is states.found[-1]:
            save(after, NEXT)
            assert held(after) == NEXT and len(after.names(RUN)) == 2 + len(data_names(after.names(RUN)))
    assert seen == sorted(seen, key=lambda number: number or 0) and seen[-1] == NEW


def new_metadata(one, other):
    return one[f"{RUN}/.metadata"] == other[f"{RUN}/.metadata"]


class Cutting:
    """A store that keeps a half of the next objects of a name, and calls that a success. Made before the first save."""

    def __init__(self, monkeypatch, name):
        self.left, real = 0, SimulatedFileSystem._pipe_file

        async def pipe_file(filesystem, path, value, **options):
            if name in path and self.left:
                self.left -= 1
                value = value[: len(value) // 2]
            await real(filesystem, path, value, **options)

        monkeypatch.setattr(SimulatedFileSystem, "_pipe_file", pipe_file)


@pytest.mark.parametrize("name", [".metadata", "manifest-", ".distcp"])
@pytest.mark.parametrize("seed", range(2))
def test_no_file_of_the_old_checkpoint_goes_before_the_new_one_is_seen_whole(store, crashed, monkeypatch, name, seed):
    """The store keeps a half of a file. When the program is killed, all old files stay, or the new ones are whole."""
    cutting = Cutting(monkeypatch, name)
    save(store, OLD)
    old = {path: data for path, data in store.objects.items() if not path.endswith("/.metadata")}
    cutting.left = 1
    with States(store, seed) as states:
        if name == ".metadata":
            save(store, NEW)
        else:
            with pytest.raises(xc.CheckpointError, match=f"has kept only .*{name}.* called each put a success"):
                save(store, NEW)
    assert not cutting.left
    for objects in states.found:
        if not all(objects.get(path) is data for path, data in old.items()):
            assert held(crashed(objects)) == NEW
    assert held(store) == (NEW if name == ".metadata" else OLD)
    assert len(store.names(RUN)) == 2 + len(data_names(store.names(RUN)))


def test_a_cut_commit_puts_the_manifest_only_once(store, monkeypatch):
    cutting = Cutting(monkeypatch, ".metadata")
    save(store, OLD)
    cutting.left = 2
    with store.recorded() as requests:
        save(store, NEW)
    puts = [request.name for request in requests if request.operation == "put"]
    assert puts.count(".metadata") == 3 and len([name for name in puts if name.startswith("manifest-")]) == 1
    assert held(store) == NEW


# What does not wait for what.


def set_after(store, when):
    """Return an event that is set when a request of some kind has been answered."""
    event, request = threading.Event(), store.request

    async def watched(operation, path, *rest):
        fault = await request(operation, path, *rest)
        if any(when(one) for one in [_Asked(operation, path.rpartition("/")[2])]):
            event.set()
        return fault

    store.request = watched
    return event


class _Asked:
    def __init__(self, operation, name):
        self.operation, self.name = operation, name


def test_the_manifest_is_put_while_data_is_still_on_its_way(store):
    manifest = set_after(store, asks("put", "manifest-*"))
    with store.failing(Fault(until=manifest), asks("put", "__0_1-*")) as met:
        save(store, NEW)
    assert met and held(store) == NEW


def test_data_is_put_while_the_lease_is_and_no_manifest_before_it(store):
    data = set_after(store, asks("put", "*.distcp"))
    leases = []

    def manifest(request):
        if asks("put", "manifest-*")(request):
            leases.append([name for name in store.names(RUN) if name.startswith("lease-")])
        return False

    with store.failing(REFUSED, manifest), store.failing(Fault(until=data), asks("put", "lease-*")) as met:
        save(store, NEW)
    assert met and len(leases) == 1 and leases[0], "without a lease, the manifest would look like that of a commit"
    assert held(store) == NEW


def test_the_version_is_read_while_the_save_is_planned(store):
    read = set_after(store, asks("get", ".metadata"))

    class Planner(xc.SPMDSavePlanner):
        def create_local_plan(self):
            assert read.wait(60)
            return super().create_local_plan()

    writer = xc.ShardWriter(store.url(RUN), storage_options=store.options)
    torch.distributed.checkpoint.save(state(NEW), storage_writer=writer, planner=Planner(), no_dist=True)
    assert held(store) == NEW


def test_a_save_whose_plan_fails_puts_nothing(store):
    class Planner(xc.SPMDSavePlanner):
        def create_local_plan(self):
            raise RuntimeError("no plan")

    writer = xc.ShardWriter(store.url(RUN), storage_options=store.options)
    with store.recorded() as requests, pytest.raises(BaseException, match="no plan"):
        torch.distributed.checkpoint.save(state(NEW), storage_writer=writer, planner=Planner(), no_dist=True)
    assert not count(requests)["put"] and not store.names(RUN)


def test_the_lease_goes_while_the_first_commit_is_looked_at(store):
    removed = set_after(store, asks("remove", "lease-*"))
    with store.failing(Fault(until=removed), asks("look", ".metadata")) as met:
        save(store, NEW)
    assert met and held(store) == NEW and not [name for name in store.names(RUN) if name.startswith("lease-")]


def test_old_files_and_the_lease_stay_while_a_commit_over_them_is_looked_at(store):
    save(store, OLD)
    before = set(store.names(RUN))
    looked, names = threading.Event(), []

    def look(request):
        if asks("look", ".metadata")(request):
            names.append(set(store.names(RUN)))
            looked.set()
        return False

    with store.failing(REFUSED, look):
        save(store, NEW)
    assert looked.is_set() and before <= names[0] and any(name.startswith("lease-") for name in names[0])
    assert not (before - {".metadata"}) & set(store.names(RUN))


def test_a_save_makes_no_more_requests_than_it_needs(store):
    """One put for each file, the lease, the manifest and .metadata; two listings, two reads, one look, one removal."""
    with store.recorded() as requests:
        save(store, NEW)
    made = count(requests)
    assert made["put"] == 3 + len(data_names(store.names(RUN)))
    assert (made["list"], made["get"], made["look"], made["remove"]) == (2, 2, 1, 1) and made.total() == made["put"] + 6


# Failures.

FAILURES = {
    "lease": asks("put", "lease-*"),
    "last data file": asks("put", "__0_2-*"),
    "manifest": asks("put", "manifest-*"),
    "listing": asks("list"),
    "version": asks("get", ".metadata"),
}


@pytest.mark.parametrize("old", [None, OLD], ids=["first save", "over an old checkpoint"])
@pytest.mark.parametrize("failing", FAILURES)
def test_a_save_that_fails_before_the_commit_leaves_no_file(store, failing, old):
    if old is not None:
        save(store, OLD)
    before = store.names(RUN)
    refused = store.failing(REFUSED, FAILURES[failing], times=1)
    with refused as met, pytest.raises(xc.CheckpointError, match="closed today"):
        save(store, NEW)
    assert met and store.names(RUN) == before and held(store) == old
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("ShardWriter")]
    assert not any(thread.join(10) or thread.is_alive() for thread in threads)


def test_an_interrupt_while_the_last_data_is_put_leaves_no_file_and_no_thread(store, monkeypatch):
    """Ctrl-C arrives in the thread that waits for the last files."""
    from torch_xla_ckpt.storage import write_threads

    wait = write_threads.WriteThreads.wait
    interrupted = []

    def interrupt(self):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(write_threads.WriteThreads, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(store, NEW)
    assert not store.names(RUN)
    assert not [t for t in threading.enumerate() if t.name.startswith("ShardWriter") and (t.join(10) or t.is_alive())]
    save(store, NEXT)
    assert held(store) == NEXT


@pytest.mark.parametrize("fault, words", [(SLOW_DOWN, "9 times in"), (REFUSED, "refused the request to")])
@pytest.mark.parametrize("what", ["lease", "manifest", "commit", "listing"])
def test_an_error_names_the_request_the_file_the_attempts_and_the_remedy(store, impatient, what, fault, words):
    requests = {**FAILURES, "commit": asks("put", ".metadata")}
    with store.failing(fault, requests[what]), pytest.raises(xc.CheckpointError) as caught:
        save(store, NEW)
    text = str(caught.value)
    file = {"lease": "write lease-", "manifest": "write manifest-", "commit": "write .metadata", "listing": "list"}[
        what
    ]
    remedy = "with fewer threads=" if fault is SLOW_DOWN else "Check the credentials"
    assert store.url(RUN) in text and f"the request to {file}" in text and words in text and remedy in text, text


def test_a_commit_that_cannot_be_looked_at_is_an_error_and_removes_nothing_old(store, impatient):
    save(store, OLD)
    before = set(store.names(RUN))
    with store.failing(REFUSED, asks("look", ".metadata")), pytest.raises(xc.CheckpointError, match="not be looked at"):
        save(store, NEW)
    assert before <= set(store.names(RUN)) and held(store) == NEW
    save(store, NEXT)
    assert held(store) == NEXT and len(store.names(RUN)) == 2 + len(data_names(store.names(RUN)))


def test_files_that_a_listing_lacks_are_looked_at_together(store):
    """A listing can lag behind."""
    save(store, NEW)
    folder = open_folder(Location.of(store.url(RUN), store.options))
    sizes = {name: len(store[f"{RUN}/{name}"]) for name in store.names(RUN)}
    assert folder.missing(sizes, {}) == []
    assert folder.missing({**sizes, "gone": 1, ".metadata": 1}, {}) == [".metadata", "gone"]

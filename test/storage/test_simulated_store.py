"""Saves to and loads from a store that refuses, loses and delays requests, and how many requests they make.

``test_s3.py`` has the real protocol of S3. Here the store is simulated, and every fault can be set for every request.
"""

import logging
import threading

import pytest
import torch

import torch_xla_ckpt as xc
from support.meshes import holds, mesh, put, random_bits, same_bits
from support.simulated_store import (
    BROKEN_AFTER,
    BROKEN_BEFORE,
    MIB,
    REFUSED,
    SLOW_DOWN,
    Fault,
    SimulatedFileSystem,
    Store,
    asks,
    count,
)
from torch_xla_ckpt.storage import chunk_bytes, read_bytes, remote, retries, stragglers
from torch_xla_ckpt.storage.deadline import together
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import Location

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RUN = "run/step-1"


@pytest.fixture
def store():
    with Store() as store:
        yield store


@pytest.fixture
def impatient(monkeypatch):
    """Pauses are short, and late answers are noticed early."""
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(retries, "LONGEST_PAUSE", 0.002)
    monkeypatch.setattr(stragglers, "STALLED", 1.0)


def host_state(seed=0, tensors=6, rows=512):
    """Tensors of 2 MiB each."""
    return {f"t{n}": random_bits((rows, 1024), torch.float32, seed * 100 + n) for n in range(tensors)}


def save(store, state, **options):
    writer = xc.ShardWriter(store.url(RUN), storage_options=store.options, **options)
    return xc.save(state, storage_writer=writer)


def loaded(store, state, **options):
    """Load into zeros. Returns the report if every bit is as in ``state``."""
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    reader = xc.ShardReader(store.url(RUN), storage_options=store.options, **options)
    report = xc.load(target, storage_reader=reader)
    assert all(same_bits(target[key], tensor) for key, tensor in state.items())
    return report


def data_names(store):
    return [name for name in store.names(RUN) if name.endswith(".distcp")]


def require_no_thread(name):
    """Check that threads of this name have ended, or do so at once."""
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(10)
            assert not thread.is_alive(), thread


# There and back, and the number of requests.


def test_a_checkpoint_is_loaded_onto_another_mesh(store):
    hosts = host_state(tensors=8)
    xc.save(
        {key: put(host, mesh((4, 2)), ("a", "b")) for key, host in hosts.items()},
        store.url(RUN),
        storage_options=store.options,
    )
    target = {key: put(torch.zeros_like(host), mesh((2, 4)), ("a", "b")) for key, host in hosts.items()}
    report = xc.load(target, store.url(RUN), storage_options=store.options)
    assert all(holds(target[key], host) for key, host in hosts.items())
    assert report.bytes_read <= 1.05 * report.bytes_needed
    assert xc.verify(store.url(RUN), storage_options=store.options).ok


def test_data_is_put_and_read_by_many_requests_at_the_same_time(store):
    """No request is answered before two others have arrived."""
    state = host_state(tensors=24)
    for operation, action in (("put", lambda: save(store, state)), ("get", lambda: loaded(store, state))):
        arrived = threading.Event()
        met = []

        def third(request, met=met, arrived=arrived, operation=operation):
            if request.operation != operation or not request.name.endswith(".distcp"):
                return False
            met.append(request)
            if len(met) >= 3:
                arrived.set()
            return True

        with store.failing(Fault(until=arrived), third):
            action()
        assert arrived.is_set() and len(met) >= 3


def test_objects_have_different_sizes_and_each_is_read_by_one_request(store):
    """Requests of one size that begin together end together, and the link is idle while their answers are handled."""
    state = host_state(tensors=48)
    with store.recorded() as requests:
        save(store, state)
    sizes = [request.nbytes for request in requests if request.name.endswith(".distcp")]
    assert sorted(size // MIB for size in sizes) == 8 * [4] + 5 * [8] + 2 * [12]
    assert all(len(store[f"{RUN}/{name}"]) // MIB == 4 for name in data_names(store) if int(name.split("-")[0][4:]) > 6)
    with store.recorded() as requests:
        loaded(store, state)
    assert sorted(request.nbytes for request in requests if request.name.endswith(".distcp")) == sorted(sizes)


def test_data_is_fetched_while_the_save_begins(store):
    """The save cannot begin before data has been fetched, and puts no data before it has begun."""
    fetched = threading.Event()

    class Planner(xc.SPMDSavePlanner):
        def resolve_data(self, item):
            fetched.set()
            return super().resolve_data(item)

    state = host_state(tensors=8)
    began = []

    def data_put(request):
        if request.operation == "put" and request.name.endswith(".distcp"):
            began.append(any(name.startswith("lease-") for name in store.names(RUN)))
        return False

    writer = xc.ShardWriter(store.url(RUN), storage_options=store.options)
    with store.failing(Fault(until=fetched), asks("get", ".metadata")) as held, store.failing(REFUSED, data_put):
        torch.distributed.checkpoint.save(state, storage_writer=writer, planner=Planner(), no_dist=True)
    assert held and began and all(began)
    loaded(store, state)


def test_all_objects_are_requested_while_the_first_is_still_being_checked(store, monkeypatch):
    state = host_state(tensors=24)
    save(store, state)
    objects, asked, all_asked = len(data_names(store)), set(), threading.Event()

    def data_get(request):
        if request.name.endswith(".distcp"):
            asked.add(request.name)
            if len(asked) == objects:
                all_asked.set()
        return False

    deliver = read_bytes.JobReader.deliver

    def held(self, fetched):
        assert all_asked.wait(60)
        return deliver(self, fetched)

    monkeypatch.setattr(read_bytes.JobReader, "deliver", held)
    with store.failing(REFUSED, data_get):
        loaded(store, state, threads=3)


def test_chunks_go_to_the_devices_in_the_memory_that_they_were_read_into(store, monkeypatch):
    hosts = host_state(tensors=8)
    state = {key: put(host, mesh((8,)), ("a", None)) for key, host in hosts.items()}
    save(store, state)
    target = {key: put(torch.zeros_like(host), mesh((8,)), ("a", None)) for key, host in hosts.items()}

    def copied(*_):
        raise AssertionError("a chunk was copied")

    monkeypatch.setattr(chunk_bytes.ChunkBytes, "copy_region", copied)
    xc.load(target, store.url(RUN), storage_options=store.options)
    assert all(holds(target[key], host) for key, host in hosts.items())


def test_the_number_of_requests_is_bounded_and_reported(store):
    state = {**host_state(tensors=24), **{f"small{n}": torch.full((3,), float(n)) for n in range(2000)}}
    with store.recorded() as requests:
        metadata = save(store, state)
    made, report = count(requests), metadata.report.requests
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert made["put"] <= nbytes // (8 * MIB) + 5 and made["list"] <= 2 and made["get"] <= 2 and made["remove"] <= 1
    assert report.total == made.total() and report.by_kind["write"] == made["put"]
    assert report.sent == sum(r.nbytes for r in requests if r.operation == "put")
    assert (report.repeated, report.asked_twice) == (0, 0)
    with store.recorded() as requests:
        report = loaded(store, state)
    made = count(requests)
    assert made["get"] <= nbytes // (8 * MIB) + 5 and made.total() == made["get"] == report.requests.total
    data = [request for request in requests if request.name.endswith(".distcp")]
    assert report.bytes_read == report.requests.received == sum(request.nbytes for request in data)


@pytest.mark.parametrize("threads", [1, 4, 64])
def test_every_number_of_threads_saves_and_loads_the_same(store, threads):
    state = host_state(tensors=12)
    save(store, state, threads=threads)
    loaded(store, state, threads=threads)
    assert len(data_names(store)) == (1 if threads == 1 else 4)


def test_data_in_flight_stays_within_the_memory_budget(store):
    state = host_state(tensors=32)
    flying, most = [], []

    def watched(request):
        if request.operation == "put" and request.name.endswith(".distcp"):
            flying.append(request.nbytes)
            most.append(sum(flying))
        return False

    original = store.put

    def put(path, data):
        original(path, data)
        if path.endswith(".distcp"):
            flying.remove(len(data))

    store.put, store.latency = put, 0.05
    with store.failing(REFUSED, watched):
        save(store, state, memory_budget=20 * MIB, threads=8)
    assert not flying and max(most) <= 21 * MIB
    loaded(store, state, memory_budget=20 * MIB)


def test_a_chunk_larger_than_one_request_is_sent_in_parts(store, monkeypatch):
    monkeypatch.setattr(remote, "_SINGLE_BYTES", 1 * MIB)
    state = host_state(tensors=3, rows=6144)  # 24 MiB each
    with store.recorded() as requests:
        save(store, state)
    made = count(requests)
    assert made["begin"] == made["complete"] == 3 and made["part"] >= 6
    assert max(request.nbytes for request in requests) <= 20 * MIB
    loaded(store, state)


def test_a_failed_upload_in_parts_leaves_nothing(store, monkeypatch):
    monkeypatch.setattr(remote, "_SINGLE_BYTES", 1 * MIB)
    state = host_state(tensors=1, rows=6144)
    with store.failing(REFUSED, asks("part")) as met, pytest.raises(xc.CheckpointError, match="closed today"):
        save(store, state)
    assert met and not data_names(store) and ".metadata" not in store.names(RUN)


# Faults that pass.

REQUESTS = {
    "lease": asks("put", "lease-*"),
    "data": asks("put", "*.distcp"),
    "manifest": asks("put", "manifest-*"),
    "commit": asks("put", ".metadata"),
    "listing": asks("list"),
    "version": asks("get", ".metadata"),
    "removing": asks("remove"),
}


@pytest.mark.parametrize("fault", [SLOW_DOWN, BROKEN_BEFORE, BROKEN_AFTER], ids=["503", "broken", "lost answer"])
@pytest.mark.parametrize("request_", REQUESTS)
def test_a_save_survives_a_request_that_fails_three_times(store, impatient, request_, fault):
    save(store, host_state(0))
    with store.failing(fault, REQUESTS[request_], times=3) as met:
        metadata = save(store, host_state(1))
    # The first look after a commit without an answer finds the commit.
    assert len(met) == (1 if request_ == "commit" and fault is BROKEN_AFTER else 3)
    if request_ != "commit":
        assert metadata.report.requests.repeated >= (1 if fault is BROKEN_AFTER else 3)
    loaded(store, host_state(1))
    assert store.names(RUN) == sorted([".metadata", *data_names(store), *[n for n in store.names(RUN) if "mani" in n]])
    assert len(store.names(RUN)) == 2 + len(data_names(store)), "files of the old checkpoint are left"


@pytest.mark.parametrize("fault", [SLOW_DOWN, BROKEN_BEFORE, BROKEN_AFTER], ids=["503", "broken", "lost answer"])
@pytest.mark.parametrize("name", [".metadata", "manifest-*", "*.distcp"])
def test_a_load_survives_a_request_that_fails_three_times(store, impatient, name, fault):
    save(store, host_state())
    with store.failing(fault, asks("get", name), times=3) as met:
        report = loaded(store, host_state())
    assert len(met) == 3 and report.requests.repeated == 3


def test_pauses_between_attempts_grow_and_are_random():
    first, second = ([next(pauses) for _ in range(12)] for pauses in (retries.pauses(), retries.pauses()))
    assert first != second
    limits = [min(retries.FIRST_PAUSE * 2**n, retries.LONGEST_PAUSE) for n in range(12)]
    assert all(0 <= pause <= limit for pause, limit in zip(first, limits)) and limits[-1] == retries.LONGEST_PAUSE


@pytest.mark.parametrize("fault", ["stalled", "slow"])
def test_a_load_asks_again_if_an_answer_is_late(store, impatient, fault):
    save(store, host_state(tensors=24))
    never = Fault(until=threading.Event()) if fault == "stalled" else Fault(rate=100.0)
    store.stream = 1e9
    with store.failing(never, asks("get", "*.distcp"), times=1) as met:
        report = loaded(store, host_state(tensors=24))
        assert met and report.requests.asked_twice == 1


@pytest.mark.parametrize("fault", ["stalled", "slow"])
def test_a_save_asks_again_if_an_answer_is_late(store, impatient, fault):
    never = Fault(until=threading.Event()) if fault == "stalled" else Fault(rate=100.0)
    store.stream = 1e9
    with store.failing(never, asks("put", "*.distcp"), times=1) as met:
        metadata = save(store, host_state(tensors=24))
        assert met and metadata.report.requests.asked_twice == 1
        loaded(store, host_state(tensors=24))
    loaded(store, host_state(tensors=24))


def test_a_put_that_was_overtaken_does_not_bring_a_removed_file_back(store, impatient):
    free = threading.Event()
    store.stream = 1e9
    with store.failing(Fault(until=free), asks("put", "*.distcp"), times=1) as met:
        save(store, host_state(tensors=24))
        folder = open_folder(Location.of(store.url(RUN), store.options))
        removal = threading.Thread(target=folder.remove, args=[[".metadata", *data_names(store)]])
        removal.start()
        removal.join(0.2)
        assert met and removal.is_alive()  # the late put is still under way
        free.set()
        removal.join()
    assert not data_names(store)


def test_requests_are_rarely_made_twice_while_the_whole_store_is_slow(monkeypatch):
    monkeypatch.setattr(stragglers, "SOONEST", 0.0)
    times = stragglers.Stragglers()
    for _ in range(100):
        times.answered(MIB, 0.1)
    assert times.patience(MIB) == pytest.approx(0.4)
    assert times.patience(9 * MIB) > 2 * times.patience(MIB)
    for _ in range(7):
        assert times.patience(MIB) < stragglers.STALLED
        times.ask_twice()
    times.ask_twice()
    assert times.patience(MIB) == stragglers.STALLED


def test_without_known_times_only_a_stalled_request_is_made_twice():
    assert stragglers.Stragglers().patience(MIB) == stragglers.STALLED


# Faults that stay.


@pytest.mark.parametrize("request_", ["lease", "data", "manifest", "commit", "version"])
@pytest.mark.parametrize("fault", [SLOW_DOWN, REFUSED, BROKEN_BEFORE], ids=["503", "refused", "broken"])
def test_a_save_that_cannot_progress_names_the_reason_and_the_old_checkpoint_stays(store, impatient, request_, fault):
    save(store, host_state(0))
    old = {name: store[f"{RUN}/{name}"] for name in store.names(RUN)}
    reason = {SLOW_DOWN: "reduce your request rate", REFUSED: "closed today", BROKEN_BEFORE: "connection broke"}[fault]
    with store.failing(fault, REQUESTS[request_]) as met, pytest.raises(xc.CheckpointError, match=reason):
        save(store, host_state(1))
    assert met
    assert {name: store[f"{RUN}/{name}"] for name in store.names(RUN) if name in old} == old
    loaded(store, host_state(0))
    save(store, host_state(2))
    loaded(store, host_state(2))
    assert len(store.names(RUN)) == 2 + len(data_names(store))


def test_a_first_save_that_cannot_progress_leaves_nothing_visible(store, impatient):
    with store.failing(SLOW_DOWN, asks("put", "__0_1-*")), pytest.raises(xc.CheckpointError, match="failed 9 times"):
        save(store, host_state(tensors=24))
    assert not data_names(store)
    with pytest.raises(xc.CheckpointError, match="no checkpoint"):
        loaded(store, host_state(tensors=24))


LATE = {
    "lease": asks("put", "lease-*"),
    "version": asks("get", ".metadata"),
    "late object": asks("put", "__0_14-*"),
    "manifest": asks("put", "manifest-*"),
    "commit": asks("put", ".metadata"),
}


@pytest.mark.parametrize("failing", LATE)
def test_a_request_that_fails_while_others_run_leaves_nothing_visible_and_no_thread(store, impatient, failing):
    with store.failing(REFUSED, LATE[failing]) as met, pytest.raises(xc.CheckpointError, match="closed today"):
        save(store, host_state(tensors=48))
    assert met and ".metadata" not in store.names(RUN)
    require_no_thread("ShardWriter")
    with pytest.raises(xc.CheckpointError, match="no checkpoint"):
        loaded(store, host_state())
    save(store, host_state(1))
    loaded(store, host_state(1))
    assert len(store.names(RUN)) == 2 + len(data_names(store))


@pytest.mark.parametrize("damaged", [False, True], ids=["refused", "damaged"])
def test_an_object_that_fails_while_others_are_delivered_fails_the_load_and_leaves_no_thread(store, damaged):
    state = host_state(tensors=24)
    save(store, state)
    last = max(data_names(store))
    if damaged:
        data = store[f"{RUN}/{last}"]
        store[f"{RUN}/{last}"] = data[:-MIB] + bytes(MIB)
    refused = asks("get", "nothing" if damaged else last)
    with store.failing(REFUSED, refused), pytest.raises(xc.CheckpointError, match="damaged" if damaged else "closed"):
        loaded(store, state)
    require_no_thread("ShardReader")


def test_a_failed_listing_at_the_beginning_fails_the_save(store, impatient):
    """The listing is made while data is written already."""
    with store.failing(REFUSED, asks("list"), times=1), pytest.raises(xc.CheckpointError, match="closed today"):
        save(store, host_state())
    assert ".metadata" not in store.names(RUN)


@pytest.mark.parametrize("fault", [SLOW_DOWN, REFUSED, BROKEN_BEFORE], ids=["503", "refused", "broken"])
def test_a_load_that_cannot_progress_names_the_reason_and_reports_no_damage(store, impatient, fault):
    save(store, host_state())
    reason = {SLOW_DOWN: "reduce your request rate", REFUSED: "closed today", BROKEN_BEFORE: "connection broke"}[fault]
    with store.failing(fault, asks("get", "*.distcp")), pytest.raises(xc.CheckpointError, match=reason) as caught:
        loaded(store, host_state())
    assert not isinstance(caught.value, xc.CorruptCheckpointError)


def test_a_missing_data_object_is_damage_and_not_asked_for_again(store):
    save(store, host_state(), threads=1)
    (name,) = data_names(store)
    store.drop(f"bucket/{RUN}/{name}")
    with store.recorded() as requests, pytest.raises(xc.CorruptCheckpointError, match=name):
        loaded(store, host_state())
    assert len([request for request in requests if request.operation == "get" and request.name == name]) <= 16


@pytest.mark.parametrize("fault", ["refuses views of memory", "cuts what it puts"])
def test_a_backend_that_takes_only_bytes_gets_bytes_and_a_cut_object_is_not_committed(store, monkeypatch, fault):
    real = SimulatedFileSystem._pipe_file

    async def pipe_file(filesystem, path, value, **options):
        if fault == "refuses views of memory" and not isinstance(value, bytes):
            raise TypeError("bytes, please")
        is_whole = fault == "refuses views of memory" or not path.endswith(".distcp")
        await real(filesystem, path, value if is_whole else value[:100], **options)

    monkeypatch.setattr(SimulatedFileSystem, "_pipe_file", pipe_file)
    if fault == "refuses views of memory":
        save(store, host_state())
        loaded(store, host_state())
    else:
        with pytest.raises(xc.CheckpointError, match="has kept only 100 of"):
            save(store, host_state())
        assert ".metadata" not in store.names(RUN)


@pytest.mark.parametrize("name, times", [("manifest-", 1), (".metadata", 1), (".metadata", 1000)])
def test_a_cut_manifest_or_commit_is_noticed(store, monkeypatch, name, times):
    real, cut = SimulatedFileSystem._pipe_file, []
    left = 0

    async def pipe_file(filesystem, path, value, **options):
        nonlocal left
        if name in path and left:
            left -= 1
            cut.append(path)
            value = value[: len(value) // 2]
        await real(filesystem, path, value, **options)

    monkeypatch.setattr(SimulatedFileSystem, "_pipe_file", pipe_file)
    save(store, host_state(0))
    before = set(store.names(RUN))
    left = times
    if name == ".metadata" and times == 1:  # put again
        save(store, host_state(1))
        loaded(store, host_state(1))
        assert len(cut) == 1
    else:
        with pytest.raises(xc.CheckpointError, match=f"kept only .*{name}.* called"):
            save(store, host_state(1))
        assert before <= set(store.names(RUN))
        if name != ".metadata":
            loaded(store, host_state(0))


# Two programs.


def test_a_commit_that_is_repeated_does_not_overwrite_the_commit_of_another_program(store, impatient):
    """The first attempt is answered by 503. Another save commits before the second attempt."""
    save(store, host_state(0))

    def other_commits(request):
        if not REQUESTS["commit"](request) or other_commits.met:
            return False
        other_commits.met = True
        thread = threading.Thread(target=lambda: save(store, host_state(7)))
        thread.start()
        other_commits.thread = thread
        return True

    other_commits.met = False
    ended = threading.Event()
    with store.failing(Fault(before=SLOW_DOWN.before, until=ended), other_commits):
        threading.Thread(target=lambda: (wait_for(other_commits), ended.set())).start()
        with pytest.raises(xc.ConcurrentSaveError):
            save(store, host_state(1))
    loaded(store, host_state(7))


def wait_for(holder):
    while not hasattr(holder, "thread"):
        threading.Event().wait(0.01)
    holder.thread.join()


def test_the_version_is_known_before_data_is_written(store):
    """Otherwise another save, which lists the data and commits, could remove files of a save that commits after it."""
    save(store, host_state(0))
    read = threading.Event()
    seen = []

    def data_after_version(request):
        if request.name.endswith(".distcp") and request.operation == "put":
            seen.append(read.is_set())
        return False

    answer = store.request

    async def request(operation, path, *rest):
        fault = await answer(operation, path, *rest)
        if operation == "get" and path.endswith("/.metadata"):
            read.set()
        return fault

    store.latency, store.request = 0.02, request
    with store.failing(REFUSED, data_after_version):
        save(store, host_state(1))
    assert seen and all(seen)


def test_files_of_a_save_that_is_alive_stay(store, caplog):
    save(store, host_state(0))
    writer = xc.ShardWriter(store.url(RUN), storage_options=store.options)
    other = xc.ShardWriter(store.url(RUN), storage_options=store.options)

    class Interrupted(xc.SPMDSavePlanner):
        def finish_plan(self, plan):
            plan = super().finish_plan(plan)
            writer._beginning.wait()
            xc.save(host_state(5), storage_writer=other)
            return plan

    with caplog.at_level(logging.WARNING), pytest.raises(BaseException) as caught:
        torch.distributed.checkpoint.save(host_state(1), storage_writer=writer, planner=Interrupted(), no_dist=True)
    assert "was changed while this save ran" in str(caught.value)
    assert "another save to" in caplog.text
    loaded(store, host_state(5))


# The report.


def test_the_report_of_a_save_shows_phases_bytes_and_requests(store):
    metadata = save(store, host_state())
    report = metadata.report
    phases = report.lock_seconds, report.plan_seconds, report.write_seconds, report.commit_seconds
    assert sum(phases) == report.seconds and min(phases) >= 0 and report.bytes_written >= 12 * MIB
    assert report.limit in ("lock", "plan", "fetch", "processor", "storage", "commit")
    assert {"plan", "begin", "fetch", "write", "commit", "remove old files"} <= set(report.timeline.seconds())
    text = str(report)
    assert f"{report.requests.total} requests" in text and "MiB sent" in text and "plan" in text


def test_the_report_of_an_async_save_shows_the_wait_for_an_earlier_save(store):
    with xc.SPMDStager(max_pending=2) as stager:
        may_end = threading.Event()
        with store.failing(Fault(until=may_end), asks("put", "*.distcp")) as met:
            first = xc.async_save(host_state(1), store.url(RUN), stager=stager, storage_options=store.options)
            second = xc.async_save(host_state(2), store.url(RUN), stager=stager, storage_options=store.options)
            assert not second.done()
            while not met:
                threading.Event().wait(0.01)
            may_end.set()
        reports = [handle.result().report for handle in (first, second)]
    assert reports[1].lock_seconds > 0 and "wait for another save" in second.timeline.seconds()
    assert all(report.requests.total for report in reports)


def test_the_report_of_a_local_save_has_no_requests(tmp_path):
    report = xc.save(host_state(), tmp_path).report
    assert report.requests.total == 0 and "requests" not in str(report) and report.bytes_written >= 12 * MIB


# Calls at the same time.


def test_calls_at_the_same_time_raise_the_first_error_after_all_have_ended():
    ended = []

    def fails(number):
        ended.append(number)
        raise ValueError(str(number))

    barrier = threading.Barrier(3, timeout=30)

    def meets():
        barrier.wait()
        ended.append("met")

    with pytest.raises(ValueError, match="7"):
        together([meets, lambda: (barrier.wait(), fails(7)), lambda: (barrier.wait(), fails(8))])
    assert sorted(map(str, ended)) == ["7", "8", "met"]
    together([])

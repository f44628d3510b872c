"""The report of a save names what took most of the time, and accounts for all seconds of the fetching thread."""

import dataclasses
import threading

import pytest
import torch

import torch_xla_ckpt as xc
from support.meshes import random_bits
from support.simulated_store import MIB, Fault, Store, asks
from torch_xla_ckpt.reports import RequestCounts, Span, Timeline
from torch_xla_ckpt.storage.save_phases import SavePhases

RECORDS = "encode manifest and metadata"
WAITS = {"wait for the writers", "wait for the last writes"}
WRITE_SPANS = {"fetch", "serialize", "pack", "checksum", "write", RECORDS, *WAITS}


@pytest.fixture
def store():
    with Store() as store:
        yield store


def lane_seconds(report):
    """Return the seconds of the thread that fetched, by operation."""
    (lane,) = {span.lane for span in report.timeline.spans if span.what == "plan"}
    own = Timeline()
    own.spans = [span for span in report.timeline.spans if span.lane == lane]
    return own.seconds()


@pytest.mark.parametrize("where", ["disk", "store"])
def test_the_work_on_many_tiny_keys_is_the_limit_and_in_the_timeline(tmp_path, store, where):
    state = {f"key{n}": torch.full((3,), float(n)) for n in range(6000)} | {f"note{n}": (n, "text") for n in range(300)}
    path, options = (store.url("run"), store.options) if where == "store" else (tmp_path / "c", None)
    report = xc.save(state, path, sync=False, storage_options=options).report
    seconds = lane_seconds(report)
    assert seconds["serialize"] > 0 and seconds["fetch"] > 0
    in_spans = sum(seconds.get(what, 0.0) for what in {*WRITE_SPANS, "commit"})
    assert in_spans > 0.7 * (report.write_seconds + report.commit_seconds), (seconds, report)
    assert report.processor_seconds + report.record_seconds > 0
    assert report.limit != "storage", report
    assert len(report.timeline.spans) < 1000, "a span for each key would cost more than the work"
    assert "processor" in str(report)


def test_a_slow_store_is_the_limit(store):
    free = threading.Event()

    def last(request):
        if asks("put", "__0_1-*")(request):
            threading.Timer(1.0, free.set).start()
            return True
        return False

    state = {f"t{n}": random_bits((512, 1024), torch.float32, n) for n in range(8)}
    with store.failing(Fault(until=free), last) as met:
        report = xc.save(state, store.url("run"), storage_options=store.options).report
    assert met and report.limit == "storage" and report.write_seconds > 0.9


def test_each_second_of_a_wait_for_another_save_is_counted_once(store):
    state = {"t": random_bits((512, 1024), torch.float32, 1)}
    writer = xc.ShardWriter(store.url("run"), storage_options=store.options)
    may_end, reports = threading.Event(), []
    with xc.SPMDStager() as stager, store.failing(Fault(until=may_end), asks("put", "*.distcp")) as met:
        xc.async_save(state, store.url("run"), stager=stager, storage_options=store.options)
        thread = threading.Thread(target=lambda: reports.append(xc.save(state, storage_writer=writer).report))
        thread.start()
        while not met:
            threading.Event().wait(0.01)
        threading.Timer(0.3, may_end.set).start()
        thread.join()
    (report,) = reports
    assert report.limit == "lock" and report.lock_seconds > 0.2
    seconds = lane_seconds(report)
    assert seconds["wait for another save"] == pytest.approx(report.lock_seconds)
    assert seconds["plan"] == pytest.approx(report.plan_seconds, abs=0.01)
    assert sum(seconds.values()) <= report.seconds + 0.01
    assert report.seconds == pytest.approx(
        report.lock_seconds + report.plan_seconds + report.write_seconds + report.commit_seconds
    )


@pytest.mark.parametrize(
    "threads, limit",
    [({"checksum": 3.0, "write": 1.0}, "processor"), ({"checksum": 1.0, "write": 3.0}, "storage"), ({}, "storage")],
)
def test_the_threads_that_the_save_waited_for_decide_between_processor_and_storage(threads, limit):
    phases = SavePhases(Timeline(), RequestCounts())
    phases.planned()
    lane, now = threading.current_thread().name, phases._planned
    phases.timeline.spans.append(Span(lane, "wait for the last writes", now, now + 8.0, 0))
    start = now
    for what, seconds in threads.items():
        phases.timeline.spans.append(Span("ShardWriter-0", what, start, start + seconds, 0))
        start += seconds
    phases._written = now + 8.0
    report = dataclasses.replace(phases.report(RequestCounts()), commit_seconds=0.1, plan_seconds=0.1)
    share = threads.get("checksum", 0.0) / (sum(threads.values()) or 1.0)
    assert report.processor_seconds == pytest.approx(8.0 * share) and report.limit == limit


def test_the_manifest_is_encoded_while_data_is_put_to_a_store(store):
    state = {f"t{n}": random_bits((512, 1024), torch.float32, n) for n in range(8)}
    report = xc.save(state, store.url("run"), storage_options=store.options).report
    assert report.record_seconds == 0 and report.timeline.seconds()[RECORDS] > 0
    assert report.bytes_written >= 16 * MIB

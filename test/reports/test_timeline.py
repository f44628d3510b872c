"""Timelines: each second of a thread counts once, whatever lies in what."""

import json
import threading

import pytest

from torch_xla_ckpt.reports import Span, Tally, Timeline, seconds_of
from torch_xla_ckpt.reports import timeline as timeline_module


def test_seconds_of_an_inner_span_count_for_it_only():
    spans = [
        Span("a", "wait", 1.0, 4.0, 0),
        Span("a", "plan", 0.0, 10.0, 0),
        Span("a", "look", 2.0, 3.0, 0),
        Span("a", "wait", 5.0, 6.0, 0),
        Span("b", "wait", 2.0, 9.0, 0),
    ]
    seconds = seconds_of(spans)
    assert seconds == {"plan": 6.0, "wait": 3.0 + 7.0, "look": 1.0}
    assert sum(seconds.values()) == 10.0 + 7.0


def test_spans_that_follow_one_another_are_not_taken_for_inner_ones():
    spans = [Span("a", "fetch", 0.0, 1.0, 0), Span("a", "write", 1.0, 3.0, 0), Span("a", "fetch", 3.0, 4.0, 0)]
    assert seconds_of(spans) == {"fetch": 2.0, "write": 2.0}


def test_spans_that_overlap_in_part_count_no_second_twice():
    seconds = seconds_of([Span("a", "commit", 0.0, 2.0, 0), Span("a", "encode", 1.5, 2.5, 0)])
    assert seconds == {"commit": 1.5, "encode": 1.0}


def test_a_tally_adds_up_operations_and_the_time_between_them(monkeypatch):
    clock = iter([10.0, 16.0, 16.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timeline = Timeline()
    tally = Tally(timeline, "pack")
    for _ in range(100):
        tally.add("fetch", 0.01, 5)
        tally.add("serialize", 0.02)
    tally.record()
    lane = threading.current_thread().name
    assert [(s.lane, s.what, s.nbytes) for s in timeline.spans] == [
        (lane, "fetch", 500),
        (lane, "serialize", 0),
        (lane, "pack", 0),
    ]
    assert timeline.seconds() == pytest.approx({"fetch": 1.0, "serialize": 2.0, "pack": 3.0})
    assert timeline.spans[0].start == 10.0 and timeline.spans[-1].stop == 16.0


def test_timed_values_are_the_same_and_one_span(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline_module, "_LEAST", 0.0)
    timeline = Timeline()
    assert list(timeline.timed("encode", (n * n for n in range(1000)))) == [n * n for n in range(1000)]
    (span,) = timeline.spans
    assert span.what == "encode" and span.stop >= span.start
    timeline.write_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_values_that_fail_are_recorded_too(monkeypatch):
    monkeypatch.setattr(timeline_module, "_LEAST", 0.0)

    def values():
        yield 1
        raise ValueError("no more")

    timeline = Timeline()
    with pytest.raises(ValueError, match="no more"):
        list(timeline.timed("encode", values()))
    assert [span.what for span in timeline.spans] == ["encode"]

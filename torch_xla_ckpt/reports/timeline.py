"""The time that each thread of a save spends on each operation, as seconds and as a trace for Perfetto."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_LEAST = 1e-5  # seconds that are worth a span


class Span(NamedTuple):
    """One operation of a thread.

    Args:
        lane: the name of the thread.
        what: the name of the operation.
        start, stop: times in seconds of ``time.perf_counter``.
        nbytes: bytes processed; 0 if the operation processes none.
    """

    lane: str
    what: str
    start: float
    stop: float
    nbytes: int


class Timeline:
    """The spans of a save, in the order in which they ended. Several threads may record spans at the same time."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def span(self, what: str, nbytes: int = 0) -> Iterator[None]:
        """Record the block as a span, also if it raises an error.

        Args:
            what: the name of the operation.
            nbytes: bytes processed. Default: 0.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, start, nbytes)

    def add(self, what: str, start: float, nbytes: int = 0) -> None:
        """Record an operation of this thread that ends now.

        Args:
            what: the name of the operation.
            start: when it began, in seconds of ``time.perf_counter``.
            nbytes: bytes processed. Default: 0.
        """
        self.spans.append(Span(threading.current_thread().name, what, start, time.perf_counter(), nbytes))

    def timed(self, what: str, values: Iterable[T]) -> Iterator[T]:
        """Yield values, and record the seconds that making them took as one span at its beginning.

        Args:
            what: the name of the operation.
            values: makes each value when it is asked for it.
        """
        tally = Tally(self)
        try:
            yield from tally.each(what, values)
        finally:
            tally.record()

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds that each operation took, added up over all threads.

        Each second of a thread counts once: if one span lies in another one, its seconds count for the inner one only.
        """
        return seconds_of(tuple(self.spans))

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the spans to a file that ui.perfetto.dev and chrome://tracing open.

        The format is Chrome's "Trace Event Format" in JSON, with times in microseconds.
        """
        spans = tuple(self.spans)
        begin = min((span.start for span in spans), default=0.0)
        lanes = {lane: n for n, lane in enumerate(dict.fromkeys(span.lane for span in sorted(spans, key=_start)))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": n, "args": {"name": lane}} for lane, n in lanes.items()
        ]
        events = [
            {
                "ph": "X",
                "name": span.what,
                "pid": 0,
                "tid": lanes[span.lane],
                "ts": (span.start - begin) * 1e6,
                "dur": (span.stop - span.start) * 1e6,
                "args": {"bytes": span.nbytes} if span.nbytes else {},
            }
            for span in spans
        ]
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": names + events, "displayTimeUnit": "ms"}, file)


class Tally:
    """Operations of one thread that alternate too often to be a span each.

    ``record`` makes one span of each operation, one after the other. So their seconds and their sum are right, and the
    moments of single operations are not.

    Args:
        timeline: records the spans.
        rest: the name of what takes the time between the operations. Default: that time is in no span.
    """

    def __init__(self, timeline: Timeline, rest: str | None = None):
        self._timeline = timeline
        self._rest = rest
        self.restart()

    def restart(self) -> None:
        """Begin anew. The time since ``record`` is in no span of the tally."""
        self._start = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._bytes: Counter[str] = Counter()

    def add(self, what: str, seconds: float, nbytes: int = 0) -> None:
        """Add an operation.

        Args:
            what: the name of the operation.
            seconds: the seconds that it took.
            nbytes: bytes processed. Default: 0.
        """
        self._seconds[what] += seconds
        self._bytes[what] += nbytes

    def each(self, what: str, values: Iterable[T]) -> Iterator[T]:
        """Yield values, and add the seconds that making them takes."""
        values = iter(values)
        while True:
            start = time.perf_counter()
            try:
                value = next(values)
            except StopIteration:
                return
            finally:
                self.add(what, time.perf_counter() - start)
            yield value

    def record(self) -> None:
        """Make spans of the operations since the start, and begin anew."""
        lane, start, stop = threading.current_thread().name, self._start, time.perf_counter()
        for what, seconds in self._seconds.items():
            if seconds < _LEAST and not self._bytes[what]:
                continue
            self._timeline.spans.append(Span(lane, what, start, start + seconds, self._bytes[what]))
            start += seconds
        if self._rest is not None and stop - start >= _LEAST:
            self._timeline.spans.append(Span(lane, self._rest, start, stop, 0))
        self.restart()


def seconds_of(spans: Sequence[Span]) -> Mapping[str, float]:
    """Return the seconds of each operation. Seconds of a span that lies in another one count for the inner one only."""
    total: dict[str, float] = {}
    open_spans: list[Span] = []  # each lies in the one before it
    for span in sorted(spans, key=lambda one: (one.lane, one.start, -one.stop)):
        while open_spans and (open_spans[-1].lane != span.lane or open_spans[-1].stop <= span.start):
            open_spans.pop()
        if open_spans:
            outer = open_spans[-1]
            total[outer.what] -= max(0.0, min(span.stop, outer.stop) - span.start)
        total[span.what] = total.get(span.what, 0.0) + span.stop - span.start
        open_spans.append(span)
    return total


def _start(span: Span) -> float:
    return span.start

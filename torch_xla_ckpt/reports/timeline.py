"""The time that each thread of a save spends on each operation, as seconds and as a trace for Perfetto."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple


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

    def seconds(self) -> Mapping[str, float]:
        """Return the seconds that each operation took, added up over all threads."""
        total: dict[str, float] = {}
        for span in tuple(self.spans):
            total[span.what] = total.get(span.what, 0.0) + span.stop - span.start
        return total

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


def _start(span: Span) -> float:
    return span.start

"""The phases of a save, measured for its report."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from torch_xla_ckpt.reports import (
    CHECKSUM,
    COMMIT,
    END,
    FETCH,
    LOCK,
    PACK,
    RECORDS,
    SERIALIZE,
    STORAGE,
    WRITE,
    RequestCounts,
    SaveReport,
    Span,
    Timeline,
    seconds_of,
)

_PROCESSOR = (SERIALIZE, PACK, CHECKSUM, RECORDS)


class SavePhases:
    """The phases of one save on one process.

    Args:
        timeline: records what the threads do.
        requests: the requests that were made before the save.
        waited: seconds for which the save waited for other saves before it was measured. Default: 0.

    Attributes:
        is_announced: whether the save has been announced, and DCP has not called the writer yet.
    """

    def __init__(self, timeline: Timeline, requests: RequestCounts, waited: float = 0.0):
        self.timeline = timeline
        self.is_announced = False
        self._waited = waited
        self._requests = requests
        self._recorded = len(timeline.spans)  # spans of the copying that comes before an async save
        self._began = self._planned = self._written = time.perf_counter()
        self._nbytes = 0
        self._lane = ""  # of the thread that fetches

    def planned(self) -> None:
        """Take note that the plan is made."""
        self.timeline.add("plan", self._began)
        self._lane = threading.current_thread().name
        self._planned = self._written = time.perf_counter()

    def written(self, nbytes: int) -> None:
        """Take note that all data of this process is written."""
        self._written, self._nbytes = time.perf_counter(), nbytes

    def report(self, requests: RequestCounts) -> SaveReport:
        """Return the report of the save, which ends now.

        Args:
            requests: the requests that were made until now.
        """
        spans = self.timeline.spans[self._recorded :]
        locks = seconds_of(spans).get(LOCK, 0.0)
        own = [span for span in spans if span.lane == self._lane]
        while_writing = seconds_of([span for span in own if self._planned <= span.start < self._written])
        # To a store, the commit is prepared while the last data is written.
        processor = sum(while_writing.get(what, 0.0) for what in (*_PROCESSOR, COMMIT))
        waited = sum(while_writing.get(what, 0.0) for what in (STORAGE, END))
        processor += waited * _processor_share(span for span in spans if span.lane != self._lane)
        return SaveReport(
            bytes_written=self._nbytes,
            lock_seconds=self._waited + locks,
            plan_seconds=self._planned - self._began - locks,
            write_seconds=self._written - self._planned,
            commit_seconds=time.perf_counter() - self._written,
            fetch_seconds=while_writing.get(FETCH, 0.0),
            storage_seconds=while_writing.get(STORAGE, 0.0),
            requests=requests - self._requests,
            timeline=self.timeline,
            processor_seconds=processor,
            record_seconds=seconds_of([span for span in own if span.start >= self._written]).get(RECORDS, 0.0),
        )


def _processor_share(spans: Iterable[Span]) -> float:
    """Return which part of the writing threads' time is the processor's, from 0 to 1."""
    seconds = seconds_of([span for span in spans if span.what in (CHECKSUM, WRITE)])
    return seconds.get(CHECKSUM, 0.0) / (sum(seconds.values()) or 1.0)

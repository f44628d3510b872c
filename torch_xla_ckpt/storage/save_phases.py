"""The phases of a save, measured for its report."""

from __future__ import annotations

import time

from torch_xla_ckpt.reports import FETCH, LOCK, STORAGE, RequestCounts, SaveReport, Timeline


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

    def planned(self) -> None:
        """Take note that the plan is made."""
        self.timeline.add("plan", self._began)
        self._planned = self._written = time.perf_counter()

    def written(self, nbytes: int) -> None:
        """Take note that all data of this process is written."""
        self._written, self._nbytes = time.perf_counter(), nbytes

    def report(self, requests: RequestCounts) -> SaveReport:
        """Return the report of the save, which ends now.

        Args:
            requests: the requests that were made until now.
        """
        seconds: dict[str, float] = {}
        for span in self.timeline.spans[self._recorded :]:
            seconds[span.what] = seconds.get(span.what, 0.0) + span.stop - span.start
        locks = seconds.get(LOCK, 0.0)
        return SaveReport(
            bytes_written=self._nbytes,
            lock_seconds=self._waited + locks,
            plan_seconds=self._planned - self._began - locks,
            write_seconds=self._written - self._planned,
            commit_seconds=time.perf_counter() - self._written,
            fetch_seconds=seconds.get(FETCH, 0.0),
            storage_seconds=seconds.get(STORAGE, 0.0),
            requests=requests - self._requests,
            timeline=self.timeline,
        )

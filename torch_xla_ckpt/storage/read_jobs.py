"""The threads of a load, within a memory budget: they fetch and deliver jobs while the caller's thread commits.

A thread that fetches from a store, or from other ranks, mostly waits. So it passes the bytes on to another thread,
which checks and copies them, and makes its next request. There are as many of the other threads as processor cores.
From local files, one thread does both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.storage.cancellation import Cancellation
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.ranges import Range, merged
from torch_xla_ckpt.storage.read_bytes import FetchedJob, JobReader
from torch_xla_ckpt.storage.read_plan import ItemRead, ReadJob
from torch_xla_ckpt.storage.read_target import ADOPTABLE, ReadResult, ReadTarget


class JobRunner:
    """Runs the read jobs of one load.

    Args:
        folder: the checkpoint's folder.
        reader: reads the bytes of a job.
        target: receives the results.
        threads: number of fetching threads.
        delivering: number of threads that deliver what the fetching threads have fetched. 0: the fetching threads do.
        memory_budget: host memory in bytes for what is read and not committed yet.
        progress: the progress bar.
    """

    def __init__(
        self,
        folder: Folder,
        reader: JobReader,
        target: ReadTarget,
        *,
        threads: int,
        delivering: int,
        memory_budget: int,
        progress: Progress,
    ):
        self._folder = folder
        self._reader = reader
        self._target = target
        self._threads = threads
        self._delivering = delivering
        self._memory_budget = memory_budget
        self._progress = progress
        self._requests = Cancellation()
        self.bytes_read = 0
        self.bytes_received = 0

    def run(self, jobs: Iterator[ReadJob]) -> None:
        """Read all jobs in threads, and commit their results in this thread."""
        used = 0
        running: dict[Future[Any], ReadJob] = {}  # futures of results, or of the futures of results

        def commit_finished() -> int:
            freed = 0
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, result = running.pop(future), future.result()
                if isinstance(result, Future):
                    running[result] = job
                else:
                    freed += job.working_bytes + self._commit(job, result)
            return freed

        with (
            ThreadPoolExecutor(max(1, self._delivering), "ShardReader-deliver") as deliverers,
            ThreadPoolExecutor(self._threads, "ShardReader") as pool,  # ends first, because it hands jobs over
        ):
            read = functools.partial(self._fetch, deliverers) if self._delivering else self._read
            most = math.inf if self._delivering else self._threads
            try:
                for job in jobs:
                    if job.is_tiny and job.round is None and not self._folder.remote:
                        self._commit(job, self._read(job))
                        continue
                    needed = job.buffer_bytes + job.working_bytes
                    while running and (used + needed > self._memory_budget or len(running) > most):
                        used -= commit_finished()
                    used += needed
                    running[pool.submit(read, job)] = job
                while running:
                    used -= commit_finished()
            except BaseException:
                self._requests.cancel()
                deliverers.shutdown(wait=False, cancel_futures=True)
                pool.shutdown(wait=False, cancel_futures=True)
                self._reader.abort()
                raise

    def _read(self, job: ReadJob) -> list[ReadResult]:
        with self._requests.applied():
            return self._reader.deliver(self._reader.fetch(job))

    def _fetch(self, deliverers: ThreadPoolExecutor, job: ReadJob) -> Future[list[ReadResult]]:
        with self._requests.applied():
            return deliverers.submit(self._deliver, self._reader.fetch(job))

    def _deliver(self, fetched: FetchedJob) -> list[ReadResult]:
        with self._requests.applied():
            return self._reader.deliver(fetched)

    def _commit(self, job: ReadJob, results: Sequence[ReadResult]) -> int:
        """Hand a job's results to the planner. Return the buffer bytes of the tensors that are complete now."""
        for result in results:
            self._target.commit(result)
        self.bytes_read += job.bytes_read
        self.bytes_received += job.bytes_received
        freed = 0
        complete: list[ItemRead] = []
        for key_reads, item in job.items:
            self._progress.advance(item.needed_bytes)
            key_reads.uncommitted -= 1
            if not key_reads.uncommitted:
                freed += key_reads.buffer_bytes
                complete += key_reads.items
        self._forget(complete)
        return freed

    def _forget(self, items: Iterable[ItemRead]) -> None:
        """Let the operating system drop the pages of large items. Neighbours are dropped together."""
        by_file: dict[str, list[Range]] = {}
        for item in items:
            stored, extent = item.stored, item.stored.extent
            if extent >= ADOPTABLE:
                by_file.setdefault(stored.relative_path, []).append((stored.offset, stored.offset + extent))
        for name, ranges in by_file.items():
            for start, stop in merged(ranges):
                self._folder.forget(name, start, stop)

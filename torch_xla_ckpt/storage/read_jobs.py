"""The threads of a load: they read jobs while the caller's thread commits, within a memory budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.ranges import Range, merged
from torch_xla_ckpt.storage.read_bytes import JobReader
from torch_xla_ckpt.storage.read_plan import ItemRead, ReadJob
from torch_xla_ckpt.storage.read_target import ADOPTABLE, ReadResult, ReadTarget


class JobRunner:
    """Runs the read jobs of one load.

    Args:
        folder: the checkpoint's folder.
        reader: reads the bytes of a job.
        target: receives the results.
        threads: number of reading threads.
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
        memory_budget: int,
        progress: Progress,
    ):
        self._folder = folder
        self._reader = reader
        self._target = target
        self._threads = threads
        self._memory_budget = memory_budget
        self._progress = progress
        self.bytes_read = 0
        self.bytes_received = 0

    def run(self, jobs: Iterator[ReadJob]) -> None:
        """Read all jobs in threads, and commit their results in this thread."""
        used = 0
        running: dict[Future[list[ReadResult]], ReadJob] = {}

        def commit_finished() -> int:
            freed = 0
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                freed += job.working_bytes + self._commit(job, future.result())
            return freed

        with ThreadPoolExecutor(self._threads, "ShardReader") as pool:
            try:
                for job in jobs:
                    if job.is_tiny and job.round is None and not self._folder.remote:
                        self._commit(job, self._reader.read(job))
                        continue
                    needed = job.buffer_bytes + job.working_bytes
                    while running and (used + needed > self._memory_budget or len(running) > self._threads):
                        used -= commit_finished()
                    used += needed
                    running[pool.submit(self._reader.read, job)] = job
                while running:
                    used -= commit_finished()
            except BaseException:
                for future in running:
                    future.cancel()
                self._reader.abort()
                raise

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

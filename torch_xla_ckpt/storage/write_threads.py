"""The threads of a save: the calling thread fetches, and other threads checksum and write.

The calling thread asks the planner for data, which fetches it from the devices. In a local folder, each other thread
writes batches into a data file of its own. Batches of tiny items are written by the calling thread: threads would only
compete for Python's lock. In a store, each batch becomes a data file, so that many requests run at the same time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.reports import CHECKSUM, END, WRITE, Tally, Timeline
from torch_xla_ckpt.runtime import forks
from torch_xla_ckpt.storage.cancellation import Cancellation, clean_up, is_interrupt
from torch_xla_ckpt.storage.data_file import DataFile, DataFiles
from torch_xla_ckpt.storage.frame import item_of
from torch_xla_ckpt.storage.memory_budget import BudgetClosed, MemoryBudget
from torch_xla_ckpt.storage.progress import Progress
from torch_xla_ckpt.storage.stored import TINY
from torch_xla_ckpt.storage.write_jobs import WriteJob, batches


class WriteThreads:
    """Writes the items of one plan. Every instance is used once.

    Args:
        files: the data files.
        threads: the number of threads, in addition to the calling thread.
        keep_tiny: write batches of tiny items in the calling thread.
        file_bytes: the mean of the bytes with which data files are full. Each batch becomes a data file. None: each
            thread writes one data file.
        budget: the memory budget of the data that is fetched and not written yet.
        progress: the progress bar.
        timeline: records what each thread does.
    """

    def __init__(
        self,
        files: DataFiles,
        threads: int,
        *,
        keep_tiny: bool,
        file_bytes: int | None,
        budget: MemoryBudget,
        progress: Progress,
        timeline: Timeline,
    ):
        self._files = files
        self._threads = threads
        self._keep_tiny = keep_tiny
        self._file_bytes = file_bytes
        self._budget = budget
        self._progress = progress
        self._timeline = timeline
        self._queue: queue.SimpleQueue[list[WriteJob] | None] = queue.SimpleQueue()
        self._batches = 0
        self._described: queue.SimpleQueue[bool] = queue.SimpleQueue()  # for each batch, once its checksums are known
        self._results: list[tuple[int, WriteResult]] = []
        self._failures: list[BaseException] = []
        self._requests = Cancellation()
        self._opened: list[DataFile] = []
        # Events, because Python considers a thread ended when an interrupt breaks off join().
        self._ends: list[threading.Event] = []

    def write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[tuple[int, WriteResult]]:
        """Hand over all items, and return what is written where as soon as all checksums are known.

        Then the last data may still be on its way. Call ``wait`` afterwards. If this raises, no file is left, and no
        thread runs any more.

        Returns:
            What is written, with the position of each item in ``items``.

        Raises:
            BaseException: what the planner or a thread raised first, or an interrupt.
        """
        owner = forks.Owner()
        try:
            cut = batches(items, planner, self._budget, self._timeline, self._file_bytes)
            self._write_batches(self._hand_over(cut))
            self._let_end()
            with self._timeline.span(END):
                for _ in range(self._batches):
                    if not self._described.get():
                        break
        except BudgetClosed:
            pass
        except BaseException as error:  # KeyboardInterrupt too: no thread may go on writing
            if not owner.is_here:  # in a child that the planner forked: threads and files are the parent's
                raise
            self._fail(error)
        if self._failures:
            self.wait()
        return self._results

    def wait(self) -> None:
        """Wait until all data is written. If this raises, no file is left, and no thread runs any more.

        Raises:
            BaseException: what the planner or a thread raised first, or an interrupt.
        """
        try:
            with self._timeline.span(END):
                self._end_threads()
        except BaseException as error:
            self._fail(error)
            self._end_threads()
        if self._failures:
            interrupt = next(filter(is_interrupt, self._failures), None)
            with clean_up(hurried=interrupt is not None):
                for file in self._opened:
                    file.abandon()
                self._files.remove(self._opened)
            raise interrupt or self._failures[0]

    def cancel(self) -> None:
        """Write nothing further, and remove what is written, because the save has failed elsewhere."""
        self._fail(CheckpointError("the save has failed"))
        with suppress(Exception):
            self.wait()

    def _hand_over(self, every_batch: Iterable[list[WriteJob]]) -> Iterator[list[WriteJob]]:
        """Hand batches to the threads, and yield those that the calling thread writes itself."""
        for batch in every_batch:
            self._batches += 1
            if self._keep_tiny and sum(job.payload for job in batch) <= TINY * len(batch):
                yield batch
            else:
                self._queue.put(batch)
                self._start_thread()

    def _start_thread(self) -> None:
        """Start one more thread, unless all have been started. Starting all at once would delay the first fetch."""
        number = len(self._ends)
        if number < self._threads:
            ended = threading.Event()
            thread = threading.Thread(target=self._run_thread, args=(ended,), name=f"ShardWriter-{number}")
            self._ends.append(ended)
            try:
                thread.start()
            except BaseException:  # an interrupt while this thread waited for the new one to begin, or before that
                if thread.ident is None:
                    ended.set()
                raise

    def _run_thread(self, ended: threading.Event) -> None:
        try:
            with self._requests.applied():
                self._write_batches(iter(self._queue.get, None))
        except BaseException as error:
            self._fail(error)
        finally:
            ended.set()

    def _write_batches(self, some_batches: Iterable[list[WriteJob]]) -> None:
        """Write batches into new data files, each of which is created with its first batch."""
        file: DataFile | None = None
        for batch in some_batches:
            if self._failures:
                return
            if file is None:
                file = self._files.create(unchanged=self._file_bytes is not None)
                self._opened.append(file)
            held = sum(job.held for job in batch)
            nbytes = sum(job.nbytes for job in batch)
            tally, before = Tally(self._timeline, CHECKSUM), file.sink_seconds
            self._results.extend(self._write_item(job, file) for job in batch)
            self._described.put(True)
            batch.clear()  # other references to the list must not keep the tensors alive
            tally.add(WRITE, file.sink_seconds - before, 0 if self._file_bytes else nbytes)
            tally.record()
            if self._file_bytes is not None:
                with self._timeline.span(WRITE, nbytes):
                    file.close()
                file = None
            self._budget.give_back(held)
        if file is not None and not self._failures:
            with self._timeline.span(WRITE):
                file.close()

    def _write_item(self, job: WriteJob, file: DataFile) -> tuple[int, WriteResult]:
        if isinstance(job.data, torch.Tensor):
            try:
                parts, data = item_of(job.data)
            except CheckpointError as error:
                raise CheckpointError(f"{job.item.index.fqn!r}: {error}") from error
        else:
            parts, data = (job.data.getbuffer(),), None
        stored = file.append(parts, data, job.sharding)
        self._progress.advance(job.nbytes)
        return job.number, WriteResult(job.item.index, stored.length, stored)

    def _fail(self, error: BaseException) -> None:
        self._failures.append(error)
        self._requests.cancel()  # a thread that writes to a store need not wait for the answer
        self._budget.close()
        self._described.put(False)

    def _let_end(self) -> None:
        """Let each thread end when it finds nothing more in the queue."""
        for _ in self._ends:
            self._queue.put(None)

    def _end_threads(self) -> None:
        """Let the threads finish the queue, and wait for them."""
        self._let_end()
        for ended in self._ends:
            ended.wait()

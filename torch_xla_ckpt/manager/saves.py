"""Saving a step: what a save is asked to do, how it runs, and what happens when it has ended."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torch_xla_ckpt import api
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager.facts import KEY
from torch_xla_ckpt.manager.rng import RNG_KEY, Generators
from torch_xla_ckpt.manager.run import Run
from torch_xla_ckpt.manager.schedule import Schedule
from torch_xla_ckpt.staging import SPMDStager, Upload
from torch_xla_ckpt.storage import ShardWriter, Written, written_sizes


@dataclass(frozen=True)
class SaveRequest:
    """What one call of ``save`` or ``save_async`` is asked to do.

    Args:
        step: the step's number.
        state_dict: the state to save.
        metrics: the metrics that the caller gave, unchecked; None for none.
        metadata: the metadata that the caller gave, unchecked.
    """

    step: int
    state_dict: dict[str, Any]
    metrics: Mapping[str, Any] | None = None
    metadata: Any = None

    def json_metrics(self) -> dict[str, float | str]:
        """Return the metrics for JSON, which lacks NaN and infinities: these become text, such as "nan" and "-inf".

        Raises:
            TypeError, ValueError: a metric is not a number.
        """
        numbers = {name: float(value) for name, value in (self.metrics or {}).items()}
        return {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}


@dataclass(frozen=True)
class WriterOptions:
    """How a manager's saves are written; see ``ShardWriter``."""

    threads: int | None
    sync: bool
    memory_budget: int


class Saver:
    """Saves steps, now or during training, and starts retention after each commit.

    Args:
        run: the run to save to.
        schedule: learns about each save that begins or fails.
        stager: runs the async saves.
        options: how files are written.
        rng: True to save the random generators too.
    """

    def __init__(self, run: Run, schedule: Schedule, stager: SPMDStager, options: WriterOptions, rng: bool):
        self._run = run
        self._processes = run.processes
        self._schedule = schedule
        self._stager = stager
        self._options = options
        self._rng = rng
        self._last_number = 0
        self._last_ended = 0

    def save(self, request: SaveRequest) -> None:
        """Save a step. Return when it is committed.

        Raises:
            CheckpointError: the save failed; or it succeeded, and an earlier async save failed.
        """
        number, active = self._begin(request.step), self._run.active
        try:
            with self._processes.agreed(f"saving step {request.step} to {self._run.steps.location}"):
                writer, state = self._prepare(request)
                self._wait_for_deletions()
            try:
                api.save(
                    state,
                    storage_writer=writer,
                    process_group=self._processes.group,
                    no_dist=self._processes.alone,
                )
            finally:
                active.blocked = active.blocked._replace(save=writer.timing.returned())
        except BaseException:
            self._schedule.failed(number, everywhere=True)
            self._ended(request.step, number, is_saved=False)
            raise
        self._ended(request.step, number, is_saved=True)
        self._stager.raise_failed()

    def save_async(self, request: SaveRequest) -> None:
        """Begin to save a step. Return when the state may change.

        Raises:
            CheckpointError: the state cannot be copied; or this save has begun, and an earlier async save failed.
        """
        number, active = self._begin(request.step), self._run.active
        with ExitStack() as if_refused:
            if_refused.callback(self._ended, request.step, number, is_saved=False)
            if_refused.callback(self._schedule.failed, number)
            with self._stager.preparing():
                writer, state = self._prepare(request)
            try:
                handle = api.save_staged(
                    state, writer, self._stager, before_writing=self._wait_for_deletions, raises_earlier=False
                )
                writer.timing.mode = handle.choice.mode
            finally:
                active.blocked = active.blocked._replace(save_async=writer.timing.returned())
            if_refused.pop_all()
        handle.upload_completion.add_done_callback(functools.partial(self._uploaded, request.step, number))
        self._stager.raise_failed()

    def wait(self) -> None:
        """Wait for all async saves and for the deletions that follow them, on every rank.

        Raises:
            CheckpointError: an async save failed, and no call has raised its error yet.
        """
        try:
            self._stager.wait()
        finally:
            self._run.wait_for_deletions(self._last_number)

    def wait_for_journal(self) -> None:
        """Wait until the journal has all saves that have ended, on every rank."""
        self._run.wait_for_deletions(self._last_ended)

    def _begin(self, step: int) -> int:
        """Count a save, and return its number."""
        number = self._schedule.begin(step)
        self._run.active.begin(step)
        self._last_number = number
        return number

    def _prepare(self, request: SaveRequest) -> tuple[_StepWriter, dict[str, Any]]:
        """Return the writer and the state of a save. Raise an error if the caller's arguments are wrong."""
        state = request.state_dict
        if self._rng:
            if RNG_KEY in state:
                raise CheckpointError(
                    f"the state has the key {RNG_KEY!r}, under which rng=True saves the random generators. Nothing was "
                    "saved. Rename the key, or create the manager without rng=True"
                )
            state = {**state, RNG_KEY: Generators(self._processes.rank)}
        return _StepWriter(request, self._run, self._options), state

    def _wait_for_deletions(self) -> None:
        """Wait for the previous saves' deletions, on the rank that deletes."""
        if self._run.retention is not None:
            self._run.retention.before_save()

    def _uploaded(self, step: int, number: int, upload: Any) -> None:
        """Called when an async save has ended."""
        assert isinstance(upload, Upload)
        is_saved = upload.error() is None
        if not is_saved:
            self._schedule.failed(number)
        self._ended(step, number, is_saved=is_saved)

    def _ended(self, step: int, number: int, *, is_saved: bool) -> None:
        run = self._run
        self._last_ended = max(self._last_ended, number)
        run.active.end(step)
        if run.retention is None:
            if is_saved:
                run.steps.saved(step)
            return
        if not is_saved:
            run.retention.after_failure(step)
        run.retention.in_thread(functools.partial(run.status.save_ended, number))


class _Timing:
    """Durations of a call of ``save`` or ``save_async``.

    Attributes:
        mode: where the tensors were copied: "device" or "host"; "sync" for ``save``.
    """

    def __init__(self) -> None:
        self.mode = "sync"
        self._start = time.perf_counter()
        self._blocked = 0.0
        self._has_returned = threading.Event()

    def elapsed(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self._start

    def returned(self) -> float:
        """Take note that the call returns to the training loop.

        Returns:
            The seconds for which the call held up the loop.
        """
        self._blocked = self.elapsed()
        self._has_returned.set()
        return self._blocked

    def fields(self, seconds: float) -> dict[str, Any]:
        """Return the fields of the journal's line, once the call has returned.

        Args:
            seconds: seconds from the call to the commit.
        """
        self._has_returned.wait()
        return {"blocked_seconds": self._blocked, "seconds": max(seconds, self._blocked), "mode": self.mode}


class _StepWriter(ShardWriter):
    """A ``ShardWriter`` that starts retention right after the commit, before the save returns on any rank.

    Attributes:
        timing: the durations of the call.

    Raises:
        TypeError, ValueError: a metric is not a number, or the metadata is not JSON.
    """

    def __init__(self, request: SaveRequest, run: Run, options: WriterOptions):
        self.timing = _Timing()
        self._number = request.step
        self._metrics = request.json_metrics()
        self._retention = run.retention
        super().__init__(
            run.steps.at(request.step),
            step=request.step,
            user_metadata={KEY: {"metrics": self._metrics, "metadata": request.metadata}},
            threads=options.threads,
            sync=options.sync,
            memory_budget=options.memory_budget,
        )

    def finish(self, metadata: Metadata, results: list[Written]) -> None:  # type: ignore[override]
        super().finish(metadata, results)
        if self._retention is not None:
            fields = functools.partial(self._journal_fields, self.timing.elapsed())
            self._retention.after_commit(self._number, self._save_id, sum(written_sizes(results).values()), fields)

    def _journal_fields(self, seconds: float) -> Mapping[str, Any]:
        return {"metrics": self._metrics, **self.timing.fields(seconds)}

"""A run's folder, seen from outside of the training program, without a process group and without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch_xla_ckpt.errors import CheckpointError, CorruptCheckpointError
from torch_xla_ckpt.manager.catalog import Catalog
from torch_xla_ckpt.manager.history import Record
from torch_xla_ckpt.manager.journal import NAME, Journal
from torch_xla_ckpt.manager.keep import Best, KeepLike, Saved, policy
from torch_xla_ckpt.manager.retention import Retention
from torch_xla_ckpt.manager.step_folder import Kind
from torch_xla_ckpt.manager.steps import Steps
from torch_xla_ckpt.manager.uncommitted import UncommittedStep, lost_commit, uncommitted_steps
from torch_xla_ckpt.manager.verdicts import Verdict, Verdicts
from torch_xla_ckpt.storage import Location, verify


@dataclass(frozen=True)
class RunStep:
    """One folder of a run that is named like a step.

    Args:
        step: the step's number.
        kind: "committed", "damaged", "unfinished" or "foreign"; see ``StepFolder``.
        flaw: a description of the damage; None if the step looks whole. Its data was not read.
        saved: when the step was committed, its metrics and its metadata.
        nbytes: size of the step's files in bytes.
        record: the newest line of the journal about this step; None if there is none.
    """

    step: int
    kind: Kind
    flaw: str | None = None
    saved: Saved = field(default_factory=lambda: Saved(-1))
    nbytes: int = 0
    record: Record | None = None


class RunFolder:
    """The steps, the journal and the retention of a run.

    Args:
        location: the run's folder.
    """

    def __init__(self, location: Location):
        self.location = location
        self._steps = Steps(location)
        self._journal = Journal(self._steps)

    @property
    def is_run(self) -> bool:
        """Whether the folder has a journal or folders named like steps."""
        return bool(self._steps.numbers()) or NAME in self._steps.root.names()

    def at(self, step: int) -> Location:
        """Return the location of a step."""
        return self._steps.at(step)

    def steps(self) -> tuple[RunStep, ...]:
        """Return all folders that are named like steps, ascending. Reads each step's manifest once."""
        records = {record.step: record for record in self._journal.history()}
        numbers = self._steps.numbers()
        return tuple(self._steps.each(lambda step: self._look(step, records.get(step)), numbers))

    def committed(self) -> list[int]:
        """Return the steps that hold a checkpoint, ascending, whether it looks damaged or not."""
        looks = self._steps.looks(self._steps.numbers())
        return [step for step, folder in looks.items() if folder.kind in ("committed", "damaged")]

    def uncommitted(self) -> tuple[UncommittedStep, ...]:
        """Return the folders of steps without ``.metadata``, ascending; see ``uncommitted_steps``."""
        return uncommitted_steps(self._steps, self._journal)

    def latest(self) -> int | None:
        """Return the newest step that looks whole; None if there is none. No data is read."""
        return next((step for step in reversed(self.committed()) if self._flaw(step) is None), None)

    def best(self, metric: str | None = None, mode: Literal["min", "max"] = "min") -> int | None:
        """Return the step with the best value of a metric.

        Args:
            metric: the metric's name. Default: the only metric that the steps have.
            mode: "min" (default) if lower values are better, "max" if higher values are.

        Raises:
            CheckpointError: the steps have several metrics, or none, and ``metric`` was not given.
        """
        if metric is None:
            metric = self._only_metric()
        return Catalog(self._steps, self.location.url).best(Best(1, metric, mode))

    def verdicts(self, keep: KeepLike) -> tuple[Verdict, ...]:
        """Return for every step whether a retention policy would delete it now, and why."""
        return Verdicts(self._steps, policy(keep), set).plan()

    def has(self, step: int) -> bool:
        """Return whether a step holds a checkpoint now, whether it looks damaged or not. Asks the storage."""
        return self._steps.look(step, fresh=True).kind in ("committed", "damaged")

    def prune(self, keep: KeepLike, verdicts: Sequence[Verdict]) -> None:
        """Delete the steps that a retention policy does not want, as a manager would, and note it in the journal.

        Reads all of the newest step first. A manager does not, because its own program has just written that step.

        Args:
            keep: the policy.
            verdicts: what ``verdicts(keep)`` has just returned.

        Raises:
            CorruptCheckpointError: the newest step is damaged. No step is deleted.
        """
        newest = self._steps.latest()
        if newest is None or all(one.kept for one in verdicts):
            return
        report = verify(self._steps.at(newest))
        if not report:
            raise CorruptCheckpointError(
                f"no step of {self.location} was deleted, because the newest step, {newest}, is damaged:\n"
                f"{report}\nMove that step to another folder, and prune again",
                report.damages,
            )
        retention = Retention(self._steps, policy(keep), self._journal, set)
        try:
            retention.delete(verdicts, newest)
        finally:
            retention.close()
            self._journal.close()

    def _only_metric(self) -> str:
        names = {name for step in self.steps() for name in step.saved.metrics}
        if len(names) == 1:
            return names.pop()
        has = f"the metrics {', '.join(sorted(names))}" if names else "no metrics"
        raise CheckpointError(
            f"cannot tell which step of {self.location} is best: its steps have {has}. Name one, as in "
            f"{self.location.url.rstrip('/')}/best:loss or .../best:accuracy:max"
        )

    def _look(self, step: int, record: Record | None) -> RunStep:
        kind = self._steps.look(step).kind
        if kind == "unfinished" and (lost := lost_commit(self._steps, step)) is not None:
            return RunStep(step, "damaged", lost, Saved(step), self._listed_bytes(step), record)
        if kind not in ("committed", "damaged"):
            return RunStep(step, kind, None, Saved(step))
        flaw = self._flaw(step)
        try:
            facts = self._steps.facts(step)
        except (FileNotFoundError, CheckpointError):
            return RunStep(step, "damaged", flaw, Saved(step), self._listed_bytes(step), record)
        nbytes = facts.nbytes or self._listed_bytes(step)
        return RunStep(step, kind if flaw is None else "damaged", flaw, facts.saved, nbytes, record)

    def _flaw(self, step: int) -> str | None:
        try:
            return self._steps.flaw(step)
        except FileNotFoundError:
            return "it was deleted just now"
        except CheckpointError as error:
            return str(error)

    def _listed_bytes(self, step: int) -> int:
        return sum(entry.size for entry in self._steps.folder(step).listing().values())

"""Questions about the committed steps of a run: their metrics and metadata, and which of them is best."""

from __future__ import annotations

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager.keep import AnyOf, Best, Keep, Saved
from torch_xla_ckpt.manager.steps import Steps


class Catalog:
    """Answers questions about committed steps. Reads each manifest once.

    Args:
        steps: the run's steps.
        path: the run's path, for error messages.
    """

    def __init__(self, steps: Steps, path: str):
        self._steps = steps
        self._path = path

    def require(self, step: int) -> None:
        """Check that a step is committed.

        Raises:
            CheckpointError: there is no such step.
        """
        if self._steps.look(step, fresh=True).kind != "committed":
            raise self._no_step(step)

    def saved(self, step: int) -> Saved:
        """Return what is known of a committed step.

        Raises:
            CheckpointError: there is no such step.
        """
        self.require(step)
        try:
            return self._steps.facts(step).saved
        except FileNotFoundError as error:
            raise self._no_step(step) from error

    def best(self, policy: Best) -> int | None:
        """Return the best committed step by a metric; None if no step has the metric."""
        gone: set[int] = set()
        while True:
            ranked = policy.ranked([one for one in self._all_saved() if one.step not in gone])
            if not ranked or self._steps.look(ranked[0].step, fresh=True).kind == "committed":
                return ranked[0].step if ranked else None
            gone.add(ranked[0].step)

    def _all_saved(self) -> list[Saved]:
        saved = self._steps.each(self._saved_or_none, self._steps.restorable())
        return [one for one in saved if one is not None]

    def _saved_or_none(self, step: int) -> Saved | None:
        try:
            return self._steps.facts(step).saved if self._steps.flaw(step) is None else None
        except FileNotFoundError:  # deleted just now
            return None

    def _no_step(self, step: int) -> CheckpointError:
        return CheckpointError(f"there is no step {step} in {self._path}. There are: {self._steps.restorable()}")


def best_policy(keep: Keep) -> Best | None:
    """Return the first ``keep.Best`` in a retention policy; None if there is none."""
    if isinstance(keep, AnyOf):
        return next((found for one in keep.policies if (found := best_policy(one)) is not None), None)
    return keep if isinstance(keep, Best) else None

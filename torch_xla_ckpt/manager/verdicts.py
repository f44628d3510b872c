"""Which steps stay and which are deleted, and why. Nothing is deleted here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.manager.keep import All, AnyOf, Best, Keep, Saved, now
from torch_xla_ckpt.manager.steps import Steps

logger = logging.getLogger(__name__)

_FIRST_LOOK = 8  # steps whose files are looked at before those of the others

_GONE = "the step is gone"
_NOT_OURS = "no policy wants it, but no CheckpointManager wrote it, so it is yours to delete"


@dataclass(frozen=True)
class Verdict:
    """What retention decides about a step.

    Args:
        step: the step's number.
        kept: False if the step will be deleted.
        reason: why.
    """

    step: int
    kept: bool
    reason: str


class Verdicts:
    """Applies a retention policy to the steps of a run.

    Args:
        steps: the run's steps.
        keep: the policy.
        saving: returns the steps that are being saved now.
    """

    def __init__(self, steps: Steps, keep: Keep, saving: Callable[[], set[int]]):
        self._steps = steps
        self._keep = keep
        self._saving = saving
        self._named: set[int] = set()  # unwanted steps that no manager wrote, and that a warning has named
        self._unknown: set[str] = set()  # metrics that no step has, and that a warning has named

    @property
    def keep_all(self) -> bool:
        """True if the policy keeps every step."""
        return any(isinstance(one, All) for one in self._policies)

    @property
    def _policies(self) -> tuple[Keep, ...]:
        return self._keep.policies if isinstance(self._keep, AnyOf) else (self._keep,)

    def plan(self) -> tuple[Verdict, ...]:
        """Return the verdicts on all steps. Reads each step's manifest once."""
        looks = self._steps.looks(self._steps.numbers())
        steps = [step for step, folder in looks.items() if folder.kind in ("committed", "damaged")]
        flaws = dict(zip(steps, self._steps.each(self._flaw, steps)))
        return self._verdicts({step: flaw for step, flaw in flaws.items() if flaw != _GONE})

    def likely(self, newest: int) -> list[Verdict]:
        """Return the steps to delete, from memory. A warning names unwanted steps that no manager wrote.

        Args:
            newest: a committed step. Only older steps are deleted.
        """
        verdicts = self._verdicts(dict.fromkeys(self._steps.believed()))
        self._name_not_ours(verdicts)
        return self._to_delete(verdicts, newest)

    def proven(self, newest: int) -> list[Verdict]:
        """Return the steps to delete, after looking at enough steps that no damaged step replaces a whole one.

        A kept step is looked at only if the verdicts would differ without it.

        Args:
            newest: a committed step that is whole, as far as its manifest and files show. Only older steps are deleted.
        """
        steps = self._steps.restorable()
        flaws: dict[int, str | None] = dict.fromkeys([*steps, *self._steps.damaged])
        seen = {newest}
        count = _FIRST_LOOK
        while True:
            verdicts = self._verdicts(flaws)
            to_delete = self._to_delete(verdicts, newest)
            numbers = [one.step for one in to_delete]
            unseen = [one.step for one in verdicts if one.kept and one.step not in seen and flaws[one.step] is None]
            without = {step: flaw for step, flaw in flaws.items() if step not in unseen}
            kept_without = {one.step for one in self._verdicts(without, warn=False) if one.kept}
            look = [step for step in numbers if step not in seen]
            if not kept_without.isdisjoint(numbers):
                look += unseen[-count:]
                count *= 2
            if not look:
                return to_delete
            seen.update(look)
            flaws.update(zip(look, self._steps.each(self._flaw, look)))
            flaws = {step: flaw for step, flaw in flaws.items() if flaw != _GONE}

    def _name_not_ours(self, verdicts: Sequence[Verdict]) -> None:
        """Log, once, the steps that no policy wants and that stay because no manager wrote them."""
        not_ours = [one.step for one in verdicts if one.reason == _NOT_OURS and one.step not in self._named]
        if not_ours:
            self._named.update(not_ours)
            logger.warning(
                "no policy wants the steps %s of %s, but no CheckpointManager wrote them, so they are never deleted. "
                "If you do not need them, delete their folders yourself",
                ", ".join(map(str, not_ours)),
                self._steps.location,
            )

    def _name_unknown(self, metric: str, saved: Sequence[Saved]) -> None:
        """Log, once, that nothing is deleted because no step has the metric of a policy."""
        if len(saved) > 1 and metric not in self._unknown:
            self._unknown.add(metric)
            known = sorted({name for one in saved for name in one.metrics})
            logger.warning(
                "keep.Best looks at the metric %r, and no step of %s has a finite value of it. The steps have %s. "
                "Until a step has it, all steps are kept. Pass metrics={%r: ...} to save, or correct the policy",
                metric,
                self._steps.location,
                f"the metrics {', '.join(map(repr, known))}" if known else "no metrics",
                metric,
            )

    def _to_delete(self, verdicts: Sequence[Verdict], newest: int) -> list[Verdict]:
        """Return the steps to delete: older than ``newest``, and not being saved."""
        saving = self._saving()
        return [one for one in verdicts if not one.kept and one.step < newest and one.step not in saving]

    def _flaw(self, step: int) -> str | None:
        """Return why a step counts for no policy; None if it counts, ``_GONE`` if there is no such step any more."""
        try:
            return self._steps.flaw(step)
        except FileNotFoundError:
            return _GONE
        except CheckpointError as error:
            return str(error)

    def _verdicts(self, flaws: Mapping[int, str | None], *, warn: bool = True) -> tuple[Verdict, ...]:
        """Return the verdicts on steps, ascending.

        Args:
            flaws: descriptions of each step's damage; None for a step that counts.
            warn: name a metric that no step has. False where these are not all steps of the run.
        """
        damaged = {**self._steps.damaged, **{step: flaw for step, flaw in flaws.items() if flaw is not None}}
        whole = sorted(step for step in flaws if step not in damaged)
        saved = self._saved(whole)
        wanted = self._keep.wanted(saved, now())
        unknown = [one.metric for one in self._policies if isinstance(one, Best) and not one.ranked(saved)]
        if unknown and len(wanted) < len(whole):  # nobody can tell yet which of them is the best
            if warn:
                self._name_unknown(unknown[0], saved)
            wanted = {**dict.fromkeys(whole, f"no step has the metric {unknown[0]!r} yet"), **wanted}
        newest = whole[-1] if whole else None
        unwanted = [step for step in whole if step not in wanted and step != newest]
        if unwanted:  # steps that others wrote must not push out what a manager saved last
            newest_ours = next((step for step in reversed(whole) if self._is_ours(step)), None)
            unwanted = [step for step in unwanted if step != newest_ours]
        not_ours = {step for step, ours in zip(unwanted, self._steps.each(self._is_ours, unwanted)) if not ours}
        verdicts = []
        for step in sorted(flaws):
            if step in damaged:
                verdicts.append(Verdict(step, True, f"it is damaged, and left for you to look at ({damaged[step]})"))
            elif step in wanted:
                verdicts.append(Verdict(step, True, wanted[step]))
            elif step == newest:
                verdicts.append(Verdict(step, True, "the newest that can be restored"))
            elif step in not_ours:
                verdicts.append(Verdict(step, True, _NOT_OURS))
            elif step not in unwanted:
                verdicts.append(Verdict(step, True, "the newest that a CheckpointManager wrote"))
            else:
                verdicts.append(Verdict(step, False, f"no policy wants it, and step {newest} is newer"))
        return tuple(verdicts)

    def _saved(self, steps: Sequence[int]) -> list[Saved]:
        """Return what the policy looks at for each step, ascending."""
        if not self._keep.needs_facts:
            return [Saved(step) for step in steps]
        return [one for one in self._steps.each(self._saved_or_none, steps) if one is not None]

    def _saved_or_none(self, step: int) -> Saved | None:
        try:
            return self._steps.facts(step).saved
        except (FileNotFoundError, CheckpointError):  # ``_flaw`` says what is wrong before any step is deleted
            return None

    def _is_ours(self, step: int) -> bool:
        """Return whether a manager wrote a step; True if its manifest cannot be read now."""
        try:
            return self._steps.facts(step).by_manager
        except (FileNotFoundError, CheckpointError):  # ``_flaw`` says what is wrong before any step is deleted
            return True

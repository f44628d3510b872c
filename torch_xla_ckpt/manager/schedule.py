"""At which steps a run saves, and when it stops because of preemption: the same answer on all ranks."""

from __future__ import annotations

import logging

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.manager.active import ActiveSaves
from torch_xla_ckpt.manager.agreement import Agreement, Facts
from torch_xla_ckpt.manager.preemption import Preemption
from torch_xla_ckpt.manager.when import Now, When

logger = logging.getLogger(__name__)


class Schedule:
    """Decides together with the other ranks when to save.

    Args:
        when: the policy.
        preemption: what this rank knows of preemption.
        processes: the ranks that decide together.
        active: the saves that are under way on this rank.
        path: the run's path, for error messages.

    Attributes:
        is_async: whether the save that ``is_due`` is asked about would be an async one, which blocks training for less
            time. None, the default: not known; as an async one, if there has been one.
    """

    def __init__(self, when: When, preemption: Preemption, processes: Processes, active: ActiveSaves, path: str):
        self._when = when
        self._preemption = preemption
        self._processes = processes
        self._path = path
        self._agreement = Agreement(processes, preemption.is_signalled, active)
        self.is_async: bool | None = None

    def is_due(self, step: int) -> bool:
        """Return whether a policy wants this step saved."""
        facts = self._facts(step)
        is_preemption_step = facts.is_preempted and self._agreement.preemption_step in (None, step)  # one is enough
        last = self._agreement.last
        blocked = facts.blocked.save_async
        if self.is_async is False or (self.is_async is None and not blocked):
            blocked = facts.blocked.save
        return self._when.due(Now(step, last, facts.seconds, is_preemption_step, facts.is_saving, blocked))

    def is_preempted(self, step: int) -> bool:
        """Return whether to expect preemption."""
        return self._facts(step).is_preempted

    def begin(self, step: int) -> int:
        """Take note that a save begins, on all ranks.

        Returns:
            The number of the save.
        """
        for_preemption = self.is_preempted(step) and self._agreement.preemption_step is None
        if for_preemption:
            logger.warning("step %s is saved because the machine is about to be preempted", step)
        return self._agreement.begin(step, for_preemption)

    def failed(self, number: int, *, everywhere: bool = False) -> None:
        """Take note that a save has failed; see ``Agreement.failed``."""
        self._agreement.failed(number, everywhere=everywhere)

    def restored(self, step: int | None) -> None:
        """Take note that the run continues from a step."""
        self._agreement.restored(step)

    def close(self) -> None:
        """End the last exchange with the other ranks."""
        self._agreement.close()

    def _facts(self, step: int) -> Facts:
        """Return what all ranks know at a step, and whether this rank has noticed preemption at this step."""
        with self._processes.worded(f"deciding whether to save step {step} to {self._path}"):
            facts = self._agreement.at(step)
        return facts._replace(is_preempted=self._preemption.is_noticed(step) or facts.is_preempted)

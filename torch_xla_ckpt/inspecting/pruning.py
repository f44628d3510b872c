"""prune: what retention policies would delete from a run, and deleting it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.inspecting.opening import open_run
from torch_xla_ckpt.inspecting.text import plural, shown, table
from torch_xla_ckpt.manager import Verdict
from torch_xla_ckpt.manager.keep import KeepLike
from torch_xla_ckpt.reports import format_bytes
from torch_xla_ckpt.storage import PathLike


@dataclass(frozen=True)
class Pruning:
    """What retention policies decide about the steps of a run. ``print`` shows a table.

    Args:
        path: the run's folder.
        verdicts: for each step whether it stays, and why.
        nbytes: size in bytes of each step's files.
        deleted: the steps that were deleted; empty for a dry run.
        is_dry: whether nothing was to be deleted.
    """

    path: str
    verdicts: tuple[Verdict, ...]
    nbytes: Mapping[int, int]
    deleted: tuple[int, ...] = ()
    is_dry: bool = True

    @property
    def superfluous(self) -> tuple[int, ...]:
        """The steps that no policy wants."""
        return tuple(one.step for one in self.verdicts if not one.kept)

    def __str__(self) -> str:
        does = "would be deleted" if self.is_dry else "DELETED"
        rows = [
            (
                str(one.step),
                format_bytes(self.nbytes.get(one.step, 0)),
                "kept" if one.kept else does if self.is_dry or one.step in self.deleted else "NOT DELETED",
                one.reason,
            )
            for one in self.verdicts
        ]
        freed = sum(self.nbytes.get(step, 0) for step in (self.superfluous if self.is_dry else self.deleted))
        count = len(self.superfluous if self.is_dry else self.deleted)
        end = (
            f"{plural(count, 'step')}, {format_bytes(freed)} {'to delete; --yes deletes' if self.is_dry else 'deleted'}"
        )
        return "\n".join([shown(self.path), table(("step", "bytes", "", "why"), rows, {0, 1}), end])


def prune(
    path: PathLike,
    keep: KeepLike,
    *,
    delete: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pruning:
    """Return which steps of a run a retention policy would delete, and delete them if asked to.

    Deletes as a ``CheckpointManager`` does: only steps that a manager wrote and that are older than the newest step,
    the commit first, with a line in the journal for each. Before that, all of the newest step is read and checked.

    Args:
        path: the run's folder.
        keep: the policy, such as ``keep.Latest(3) | keep.Best(1, "loss")``.
        delete: whether to delete. Default False: nothing is changed.
        storage_options: options of the fsspec filesystem behind a URL. Default: none.

    Raises:
        CorruptCheckpointError: the newest step is damaged. Nothing is deleted.
        CheckpointError: there is no run, or the storage does not answer.
    """
    run = open_run(path, storage_options)
    verdicts = run.verdicts(keep)
    nbytes = {one.step: one.nbytes for one in run.steps()}
    if not delete:
        return Pruning(run.location.url, verdicts, nbytes)
    run.prune(keep, verdicts)
    deleted = tuple(one.step for one in verdicts if not one.kept and not run.has(one.step))
    return Pruning(run.location.url, verdicts, nbytes, deleted, is_dry=False)


def require_deleted(found: Pruning) -> None:
    """Raise an error if steps are still there that were to be deleted.

    Raises:
        CheckpointError: naming these steps.
    """
    rest = [step for step in found.superfluous if step not in found.deleted]
    if rest and not found.is_dry:
        raise CheckpointError(
            f"the steps {', '.join(map(str, rest))} of {found.path} could not be deleted. Their last lines in "
            "journal.jsonl say why. Check the access rights, and run the command again"
        )

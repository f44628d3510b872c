"""check: whether every byte of a checkpoint, or of all steps of a run, is as it was written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_xla_ckpt.errors import CheckpointError, Damage
from torch_xla_ckpt.inspecting.opening import LIGHTNINGS_FILE, open_path
from torch_xla_ckpt.inspecting.text import plural, shown
from torch_xla_ckpt.manager import RunFolder
from torch_xla_ckpt.protocols import Folder
from torch_xla_ckpt.reports import format_bytes
from torch_xla_ckpt.serialization import METADATA
from torch_xla_ckpt.storage import (
    Location,
    OnProgress,
    PathLike,
    VerifyReport,
    is_checkpoint_file,
    open_folder,
    read_listing,
    verify,
)

_SHOWN = 5  # files of a kind that are named


@dataclass(frozen=True)
class Check:
    """The result of checking one checkpoint. ``bool`` is False if it is damaged, or could not be checked.

    Args:
        path: the checkpoint's folder.
        report: what reading all bytes has found; None if the checkpoint could not be checked.
        leftovers: files of other saves in the folder, which broke off or run now. They take room and harm nothing.
        strangers: files that no save wrote. They are left alone.
        problem: why nothing could be checked; "" if something was.
    """

    path: str
    report: VerifyReport | None
    leftovers: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether no damage was found."""
        return self.report is not None and self.report.ok

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        report = self.report
        if report is None:
            return [f"NOT CHECKED  {shown(self.path)}", f"  {shown(self.problem)}"]
        read = f"{format_bytes(report.bytes_read)} in {plural(report.files, 'file')}, checked by {report.checked_by}"
        lines = [f"{'whole' if report.ok else 'DAMAGED'}  {shown(self.path)}  {read}"]
        lines += [f"  {shown(damage)}" for damage in report.damages]
        lines += [f"  {shown(repr(key))}: {shown(what)}" for key, what in report.incomplete.items()]
        if report.unchecked:
            nbytes = format_bytes(report.bytes_unchecked)
            lines.append(f"  not checked, because it has no checksum: {nbytes} of {_some(report.unchecked)}")
        if self.leftovers:
            lines.append(f"  left over by other saves: {_some(self.leftovers)}")
        if self.strangers:
            lines.append(f"  not part of the checkpoint: {_some(self.strangers)}")
        return lines


@dataclass(frozen=True)
class Unfinished:
    """A folder of a run with files of a save that runs or broke off, or of a deletion that broke off.

    Args:
        path: the folder.
        files: number of files.
        nbytes: their size in bytes.
    """

    path: str
    files: int
    nbytes: int

    def __str__(self) -> str:
        size = f"{plural(self.files, 'file')}, {format_bytes(self.nbytes)}"
        return f"unfinished  {shown(self.path)}  {size}, without a commit: a save runs there, or broke off"


@dataclass(frozen=True)
class Checks:
    """The results of checking several checkpoints. ``bool`` is False if any is damaged, or could not be checked.

    Args:
        checks: one result for each checkpoint, in order.
        unfinished: folders of the runs that never became checkpoints, or were deleted. They are not checked.
    """

    checks: tuple[Check, ...]
    unfinished: tuple[Unfinished, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no damage was found."""
        return all(self.checks)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def unanswered(self) -> tuple[Check, ...]:
        """The checkpoints that could not be checked."""
        return tuple(one for one in self.checks if one.report is None)

    def __str__(self) -> str:
        lines = [str(one) for one in (*self.checks, *self.unfinished)]
        if len(lines) != 1:
            unanswered = len(self.unanswered)
            damaged = sum(not check for check in self.checks) - unanswered
            rest = f", {unanswered} not checked" if unanswered else ""
            rest += f", {len(self.unfinished)} unfinished" if self.unfinished else ""
            lines.append(f"{plural(len(self.checks), 'checkpoint')}, {damaged or 'none'} damaged{rest}")
        return "\n".join(lines)


def check(
    *paths: PathLike, storage_options: Mapping[str, Any] | None = None, progress: OnProgress | None = None
) -> Checks:
    """Read checkpoints, or all steps of runs, and report all damage, and the files that belong to no checkpoint.

    Args:
        paths: checkpoints or runs, as for ``inspect``.
        storage_options: options of the fsspec filesystem behind a URL. Default: none.
        progress: called from several threads with the bytes just checked and the bytes of that checkpoint. Default:
            not called.

    Raises:
        CheckpointError: the only path holds neither a checkpoint nor a run, or its storage does not answer. Of several
            paths, ``Checks.unanswered`` has these.
    """
    found: list[Check] = []
    unfinished: list[Unfinished] = []
    for path in paths:
        try:
            target = open_path(path, storage_options, ranks_own=True)
            if isinstance(target, RunFolder):
                checked = _check_steps(target, progress)
                found += checked.checks
                unfinished += checked.unfinished
            else:
                found.append(_check(target.location, progress))
        except CheckpointError as error:
            if len(paths) == 1:
                raise
            found.append(Check(os.fspath(path), None, problem=str(error)))
    return Checks(tuple(found), tuple(unfinished))


def require_checked(found: Checks) -> None:
    """Raise an error if some checkpoints could not be checked.

    Raises:
        CheckpointError: naming these checkpoints.
    """
    if rest := found.unanswered:
        raise CheckpointError(
            f"could not check {', '.join(one.path for one in rest[:_SHOWN])}{_more(rest)}: {rest[0].problem}"
        )


def _check_steps(run: RunFolder, progress: OnProgress | None) -> Checks:
    """Check all steps of a run. Steps that were deleted meanwhile are left out.

    Raises:
        CheckpointError: the run has no step.
    """
    steps = run.committed()
    suspects = {one.step for one in run.uncommitted() if one.flaw is not None}
    if not steps and not suspects:
        raise CheckpointError(f"the run {run.location} has no committed step, so there is nothing to check")
    found: dict[int, Check] = {}
    for step in steps:
        try:
            found[step] = _check(run.at(step), progress)
        except CheckpointError as error:
            if step in run.committed():
                found[step] = Check(run.at(step).url, None, problem=str(error))
    unfinished = []
    for one in run.uncommitted():  # the second look: a deletion that was under way has ended, or has come further
        url = run.at(one.step).url
        if one.flaw is None or one.step not in suspects:
            unfinished.append(Unfinished(url, one.files, one.nbytes))
        else:
            damage = Damage(METADATA, 0, 0, (), f"{one.flaw}. Put {METADATA} back from a copy, or delete the step")
            found[one.step] = Check(url, VerifyReport(url, (damage,), {}, 0, 0, "structure"))
    return Checks(tuple(found[step] for step in sorted(found)), tuple(unfinished))


def _check(location: Location, progress: OnProgress | None) -> Check:
    report = verify(location, progress=progress or False)
    folder = open_folder(location, sync=False)
    leftovers, strangers = _others(folder)
    return Check(location.url, report, leftovers, strangers)


def _others(folder: Folder) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files in a folder that do not belong to its checkpoint: of other saves, and of nobody's saves."""
    try:
        listing = read_listing(folder)
    except (CheckpointError, OSError):
        return (), ()
    own = {METADATA, LIGHTNINGS_FILE, ".manager_metadata", f"manifest-{listing.save_id}.json", *listing.files}
    others = sorted(set(folder.names()) - own)
    leftovers = tuple(name for name in others if is_checkpoint_file(name))
    return leftovers, tuple(name for name in others if name not in leftovers)


def _some(names: Sequence[str]) -> str:
    return shown(", ".join(names[:_SHOWN])) + _more(names)


def _more(things: Sequence[object]) -> str:
    return f" and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""

"""check: whether every byte of a checkpoint, or of all steps of a run, is as it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.inspecting.opening import open_path
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
    """The result of checking one checkpoint. ``bool`` is False if it is damaged.

    Args:
        report: what reading all bytes has found; None if the checkpoint cannot be opened.
        leftovers: files of other saves in the folder, which broke off or run now. They take room and harm nothing.
        strangers: files that no save wrote. They are left alone.
        problem: why the checkpoint cannot be opened; "" if it can.
        path: the checkpoint's folder.
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
            return [f"DAMAGED  {shown(self.path)}", f"  {shown(self.problem)}"]
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
class Checks:
    """The results of checking several checkpoints. ``bool`` is False if any of them is damaged.

    Args:
        checks: one result for each checkpoint, in order.
    """

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no damage was found."""
        return all(self.checks)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        damaged = sum(not check for check in self.checks)
        lines = [str(check) for check in self.checks]
        if len(self.checks) != 1:
            lines.append(f"{plural(len(self.checks), 'checkpoint')}, {damaged or 'none'} damaged")
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
        CheckpointError: there is neither a checkpoint nor a run at a path, or the storage does not answer.
    """
    found = []
    for path in paths:
        target = open_path(path, storage_options, ranks_own=True)
        if not isinstance(target, RunFolder):
            found.append(_check(target.location, progress))
            continue
        steps = target.committed()
        if not steps:
            raise CheckpointError(f"the run {target.location} has no committed step, so there is nothing to check")
        found += [_check(target.at(step), progress, in_run=True) for step in steps]
    return Checks(tuple(found))


def _check(location: Location, progress: OnProgress | None, *, in_run: bool = False) -> Check:
    """Check one checkpoint. In a run, one that cannot be opened is a result, so that the others are checked too."""
    try:
        report = verify(location, progress=progress or False)
    except CheckpointError as error:
        if not in_run:
            raise
        return Check(location.url, None, problem=str(error))
    folder = open_folder(location, sync=False)
    leftovers, strangers = _others(folder)
    return Check(location.url, report, leftovers, strangers)


def _others(folder: Folder) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files in a folder that do not belong to its checkpoint: of other saves, and of nobody's saves."""
    try:
        listing = read_listing(folder)
    except (CheckpointError, OSError):
        return (), ()
    own = {METADATA, "meta.pt", ".manager_metadata", f"manifest-{listing.save_id}.json", *listing.files}
    others = sorted(set(folder.names()) - own)
    leftovers = tuple(name for name in others if is_checkpoint_file(name))
    return leftovers, tuple(name for name in others if name not in leftovers)


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return shown(", ".join(names[:_SHOWN])) + more

"""inspect: what a checkpoint or a run holds."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.inspecting.folding import Fold, fold
from torch_xla_ckpt.inspecting.opening import Checkpoint, Writer, open_path
from torch_xla_ckpt.inspecting.shardings import short_sharding
from torch_xla_ckpt.inspecting.text import plural, shown, table
from torch_xla_ckpt.inspecting.trees import Sort, tree_lines
from torch_xla_ckpt.inspecting.words import shape_words
from torch_xla_ckpt.manager import RunFolder, RunStep, keep
from torch_xla_ckpt.reports import format_bytes
from torch_xla_ckpt.storage import ListedKey, PathLike


@dataclass(frozen=True)
class Contents:
    """The keys of a checkpoint. ``print`` shows a table in which keys that are alike share a line.

    Args:
        path: the checkpoint's folder.
        writer: "torch_xla_ckpt", "dcp" (stock, or torch_xla's planners), "lightning", "torch_xla" (its manager),
            "safetensors", or "torch.save".
        keys: the keys, in saved order.
        nbytes: bytes of all tensors and objects.
        files: number of data files.
        step: the training step; None if it was not recorded.
        time: time of the commit, ISO 8601 in UTC; "" if it was not recorded.
        software: versions of the software that wrote the checkpoint, by name.
        user_metadata: the JSON value that was given to the save; the texts under ``__metadata__`` of safetensors files.
        saved_by: the process that committed the checkpoint; "" if it was not recorded.
    """

    path: str
    writer: Writer
    keys: tuple[ListedKey, ...]
    nbytes: int
    files: int
    step: int | None = None
    time: str = ""
    software: Mapping[str, str] | None = None
    user_metadata: Any = None
    saved_by: str = ""

    def head(self) -> str:
        """Return the path, and two lines about the checkpoint as a whole."""
        return "\n  ".join([shown(self.path), *self.facts()])

    def facts(self) -> tuple[str, str]:
        """Return one line about the checkpoint's size, and one about its origin."""
        tensors = sum(one.dtype is not None for one in self.keys)
        size = [
            plural(tensors, "tensor"),
            plural(len(self.keys) - tensors, "object"),
            format_bytes(self.nbytes),
            f"in {plural(self.files, 'file')}",
        ]
        origin = [
            f"by {self.writer}",
            *([f"step {self.step}"] if self.step is not None else []),
            *([self.time] if self.time else []),
        ]
        return shown(", ".join(size)), shown(", ".join(origin))

    def rows(self, *, every: bool = False, sort: Sort = "saved") -> list[Fold[ListedKey]]:
        """Return the lines of the table.

        Args:
            every: give every key a line of its own. Default: keys that differ only in numbers, and not in shape, dtype,
                chunks or sharding, share a line.
            sort: "saved" (default), "key", or "bytes" for the largest first.
        """
        alone = [Fold(one.key, (one,)) for one in self.keys] if every else None
        rows = alone or fold(self.keys, lambda one: one.key, _kind)
        if sort == "bytes":
            rows.sort(key=lambda row: -sum(one.nbytes for one in row.members))
        elif sort == "key":
            rows.sort(key=lambda row: row.name)
        return rows

    def table(self, *, every: bool = False, sort: Sort = "saved") -> str:
        """Return the table; see ``rows``."""
        rows = self.rows(every=every, sort=sort)
        return table(HEAD, [cells(row) for row in rows], right={0, 1, 2})

    def tree(self, depth: int | None = None, *, every: bool = False, sort: Sort = "saved") -> str:
        """Return the keys as a tree with sizes added up.

        Args:
            depth: levels to show. Default: all.
            every: give every branch a line of its own. Default: branches that are alike share a line.
            sort: the order of branches; see ``rows``.
        """
        return "\n".join(tree_lines(self.keys, depth, every=every, sort=sort))

    def __str__(self) -> str:
        return f"{self.head()}\n{self.table()}" if self.keys else self.head()


HEAD = ("keys", "bytes", "chunks", "dtype", "shape", "sharding", "key")


def cells(row: Fold[ListedKey]) -> tuple[str, ...]:
    """Return the cells of one line of the table, in the order of ``HEAD``."""
    first = row.members[0]
    return (
        str(len(row.members)) if len(row.members) > 1 else "",
        format_bytes(sum(one.nbytes for one in row.members)),
        str(sum(one.chunks for one in row.members)),
        first.dtype or "object",
        "" if first.shape is None else shape_words(first.shape),
        short_sharding(first.sharding, len(first.shape or ())),
        row.name,
    )


@dataclass(frozen=True)
class RunContents:
    """The steps of a run. ``print`` shows a table.

    Args:
        path: the run's folder.
        steps: the steps, ascending; also folders that are named like steps and hold none.
        kept: for each step why a retention policy would keep it, or that it would delete it; empty without a policy.
    """

    path: str
    steps: tuple[RunStep, ...]
    kept: Mapping[int, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all steps."""
        return sum(one.nbytes for one in self.steps)

    def head(self) -> str:
        """Return the path, and one line about the run as a whole."""
        return f"{shown(self.path)}\n  {self.summary()}"

    def summary(self) -> str:
        """Return one line about the run as a whole."""
        whole = sum(one.kind == "committed" for one in self.steps)
        return f"run of {plural(whole, 'step')}, {format_bytes(self.nbytes)}"

    def table(self, now: datetime | None = None) -> str:
        """Return the table of steps.

        Args:
            now: the time from which ages count, with a time zone. Default: the current time.
        """
        now = now or datetime.now(timezone.utc)
        head = ("step", "age", "bytes", "blocked", "took", "mode", "metrics", "state")
        return table(head, [self._cells(one, now) for one in self.steps], right={0, 1, 2, 3, 4})

    def _cells(self, one: RunStep, now: datetime) -> tuple[str, ...]:
        record = one.record
        state = "" if one.kind == "committed" else one.kind.upper() if one.kind == "damaged" else one.kind
        notes = [part for part in (state, one.flaw, self.kept.get(one.step)) if part]
        return (
            str(one.step),
            "" if one.saved.time is None else age((now - one.saved.time).total_seconds()),
            format_bytes(one.nbytes),
            "" if record is None else f"{record.blocked_seconds * 1e3:,.0f} ms",
            "" if record is None else f"{record.seconds:,.2f} s",
            "" if record is None else record.mode,
            ", ".join(f"{name} {value:.4g}" for name, value in one.saved.metrics.items()),
            ": ".join(notes) or "ok",
        )

    def __str__(self) -> str:
        return f"{self.head()}\n{self.table()}" if self.steps else self.head()


def inspect(
    path: PathLike,
    *patterns: str,
    keep: keep.KeepLike | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Contents | RunContents:
    """Return what a checkpoint or a run holds. Reads no data of tensors, and needs no device and no process group.

    Args:
        path: a checkpoint of this package, of stock DCP, of torch_xla's planners or of Lightning; a run of a
            ``CheckpointManager``; or ``RUN/latest``, ``RUN/best``, ``RUN/best:METRIC:max``. A local path or fsspec URL.
        patterns: globs of the keys to list, such as ``"model.*"``. Default: all keys.
        keep: a retention policy; the result says which steps of a run it keeps. Default: none.
        storage_options: options of the fsspec filesystem behind a URL. Default: none.

    Raises:
        CheckpointError: there is neither a checkpoint nor a run; a pattern matches no key; or patterns were given for a
            run, or a policy for a checkpoint.
        CorruptCheckpointError: ``.metadata`` or the manifest is not what was written.
        UnsafeObjectError: ``.metadata`` names something that could run code.
    """
    found = open_path(path, storage_options)
    if isinstance(found, RunFolder):
        return _run(found, patterns, keep)
    if keep is not None:
        raise CheckpointError(
            f"{found.location} is one checkpoint, and a retention policy is for the steps of a run. Pass the folder "
            "that holds the run's steps"
        )
    return contents_of(found, patterns)


def contents_of(checkpoint: Checkpoint, patterns: Sequence[str] = ()) -> Contents:
    """Return what a checkpoint holds; see ``inspect``."""
    listing = checkpoint.listing()
    keys = select(listing.keys, lambda one: one.key, patterns)
    return Contents(
        path=checkpoint.location.url,
        writer=checkpoint.writer(listing),
        keys=tuple(keys),
        nbytes=sum(one.nbytes for one in keys),
        files=len(listing.files),
        step=listing.step,
        time=listing.time,
        software=listing.software,
        user_metadata=listing.user_metadata,
        saved_by=listing.writer,
    )


def select(keys: Sequence[Any], key: Callable[[Any], str], patterns: Sequence[str]) -> Sequence[Any]:
    """Return the values whose key matches one of some globs; all of them if there are no globs.

    Raises:
        CheckpointError: a glob matches no key.
    """
    if not patterns:
        return keys
    unused = [p for p in patterns if not any(fnmatch.fnmatchcase(key(one), p) for one in keys)]
    if unused:
        raise CheckpointError(
            f"no key of the checkpoint matches {', '.join(map(repr, unused))}. Patterns are globs of whole keys, such "
            "as 'model.*'. 'xc ls PATH' lists the keys"
        )
    return [one for one in keys if any(fnmatch.fnmatchcase(key(one), p) for p in patterns)]


def age(seconds: float) -> str:
    """Return a duration for people: "5 s", "12 min", "3 h", "8 d"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _kind(one: ListedKey) -> tuple[Any, ...]:
    """Return what keys on one line have in common. Objects may differ in size."""
    return one.dtype, one.shape, one.chunks, one.sharding


def _run(run: RunFolder, patterns: Sequence[str], keep: keep.KeepLike | None) -> RunContents:
    if patterns:
        raise CheckpointError(
            f"{run.location} is the folder of a run, which has no keys. Name a step, as in {run.location}/latest"
        )
    kept = {}
    if keep is not None:
        kept = {one.step: one.reason if one.kept else f"would be deleted: {one.reason}" for one in run.verdicts(keep)}
    return RunContents(run.location.url, run.steps(), kept)

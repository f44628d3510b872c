"""report: everything about a checkpoint or a run that one page can show, with suspicious values marked."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_xla_ckpt.inspecting.contents import Contents, RunContents, contents_of, inspect
from torch_xla_ckpt.inspecting.folding import fold
from torch_xla_ckpt.inspecting.layouts import Layout, layout_of
from torch_xla_ckpt.inspecting.opening import Checkpoint, open_path
from torch_xla_ckpt.inspecting.reading import Values
from torch_xla_ckpt.inspecting.statistics import Collector, Statistics, has_statistics
from torch_xla_ckpt.inspecting.text import shown
from torch_xla_ckpt.layout import Box
from torch_xla_ckpt.manager import RunFolder
from torch_xla_ckpt.storage import ListedKey, PathLike

_MOST_LAYOUTS = 6  # tensors whose layouts are drawn
_HUGE = 1e4  # absolute value from which an element of a weight is suspicious
_EXPLODED = 10.0  # root mean square of a tensor over the median of the tensors like it
_FEWEST_ALIKE = 3  # tensors of which a median says something


@dataclass(frozen=True)
class TensorFacts:
    """What reading a tensor has found.

    Args:
        key: the tensor's key.
        dtype: the dtype, such as "float32".
        shape: the shape.
        nbytes: bytes of all elements.
        statistics: the statistics of all elements.
        dead_rows: number of indices of the first dimension whose elements are all zero; None for vectors and scalars.
        suspicions: what is unusual, in words; empty if nothing is.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    statistics: Statistics
    dead_rows: int | None
    suspicions: tuple[str, ...] = ()

    @property
    def rms(self) -> float | None:
        """Root mean square of the finite elements; None if there are none."""
        found = self.statistics
        return None if found.mean is None or found.std is None else math.hypot(found.mean, found.std)


@dataclass(frozen=True)
class Report:
    """What a page about a checkpoint or a run shows.

    Args:
        run: the steps; None for a checkpoint.
        contents: the keys of the checkpoint, or of the run's newest step that looks whole; None if there is none.
        tensors: the facts of each tensor that was read, in saved order.
        layouts: where the largest tensors lie.
    """

    run: RunContents | None
    contents: Contents | None
    tensors: tuple[TensorFacts, ...]
    layouts: tuple[Layout, ...]

    @property
    def suspicious(self) -> tuple[TensorFacts, ...]:
        """The tensors that have something unusual."""
        return tuple(one for one in self.tensors if one.suspicions)

    def __str__(self) -> str:
        lines = [] if self.run is None else [self.run.head()]
        lines += [] if self.contents is None else [self.contents.head()]
        lines += [f"  {shown(one.key)}: {', '.join(one.suspicions)}" for one in self.suspicious]
        return "\n".join(lines)


def report(
    path: PathLike,
    *,
    values: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Report:
    """Return what a page about a checkpoint or a run shows. Reads all tensors of the checkpoint, in pieces.

    Args:
        path: a checkpoint or a run, as for ``inspect``. Of a run, the newest step that looks whole is read.
        values: whether to read tensors and to compute statistics. Default True.
        storage_options: options of the fsspec filesystem behind a URL. Default: none.
        progress: called with the bytes just read and the bytes of all tensors. Default: not called.

    Raises:
        CheckpointError: there is neither a checkpoint nor a run.
        CorruptCheckpointError: bytes are not what was written.
    """
    found = open_path(path, storage_options)
    run = None
    if isinstance(found, RunFolder):
        listed = inspect(path, storage_options=storage_options)
        run = listed if isinstance(listed, RunContents) else None
        step = found.latest()
        if step is None:
            return Report(run, None, (), ())
        inner = open_path(found.at(step), storage_options)
        assert isinstance(inner, Checkpoint)
        found = inner
    contents = contents_of(found)
    opened = Values(found)
    tensors = [one for one in contents.keys if one.dtype is not None]
    largest = sorted(tensors, key=lambda one: -one.nbytes)[:_MOST_LAYOUTS]
    layouts = tuple(layout_of(opened.metadata, one.key) for one in largest)
    facts = []
    if values:
        total = sum(one.nbytes for one in tensors)
        for one in filter(lambda one: has_statistics(one.dtype or ""), tensors):
            facts.append(_facts(opened, one, (lambda n: progress(n, total)) if progress else None))
    return Report(run, contents, _judged(facts), layouts)


def _facts(values: Values, listed: ListedKey, advance: Callable[[int], object] | None) -> TensorFacts:
    """Read a tensor and collect its facts."""
    key = listed.key
    saved = values.entry(key)
    assert isinstance(saved, TensorStorageMetadata)
    shape = tuple(saved.size)
    collector = Collector(key)
    alive = torch.zeros(shape[0], dtype=torch.bool) if len(shape) > 1 else None
    for piece in values.pieces(key, Box.whole(shape)):
        elements = values.tensor(key, piece)
        collector.add(elements)
        if alive is not None:
            rows = slice(piece.offsets[0], piece.offsets[0] + piece.sizes[0])
            alive[rows] |= _is_alive(elements)
        if advance is not None:
            advance(piece.volume * saved.properties.dtype.itemsize)
    dead = None if alive is None else int((~alive).sum())
    return TensorFacts(key, listed.dtype or "", shape, listed.nbytes, collector.result(), dead)


def _is_alive(elements: torch.Tensor) -> torch.Tensor:
    """Return for each index of the first dimension whether it has an element that is not zero."""
    rows = elements.reshape(elements.shape[0], -1)
    if rows.is_floating_point() or rows.is_complex():
        return ((rows if rows.itemsize >= 4 else rows.float()) != 0).any(dim=1)
    return torch.from_numpy((rows.numpy() != 0).any(axis=1))  # torch lacks operations on unsigned integers


def _judged(facts: list[TensorFacts]) -> tuple[TensorFacts, ...]:
    """Return facts with their suspicions. A tensor is compared with those whose keys differ in numbers only."""
    medians: dict[str, float] = {}
    for line in fold(facts, lambda one: one.key, lambda one: (one.dtype, one.shape)):
        sizes = [one.rms for one in line.members if one.rms is not None]
        if len(sizes) >= _FEWEST_ALIKE:
            medians.update(dict.fromkeys((one.key for one in line.members), statistics.median(sizes)))
    return tuple(replace(one, suspicions=tuple(_suspicions(one, medians.get(one.key)))) for one in facts)


def _suspicions(one: TensorFacts, median: float | None) -> list[str]:
    if not one.dtype.startswith(("float", "bfloat", "complex")) or not one.statistics.count:
        return []
    found = one.statistics
    notes = [f"{n:,} {what}" for n, what in ((found.nans, "NaN"), (found.infs, "Inf")) if n]
    if one.dead_rows and one.dead_rows < one.shape[0]:
        notes.append(f"{one.dead_rows:,} dead of {one.shape[0]:,} rows")
    elif one.dead_rows and found.zeros == found.count:
        notes.append("all zeros")
    largest = max(abs(found.min or 0), abs(found.max or 0))
    if largest > _HUGE:
        notes.append(f"huge values, up to {largest:.3g}")
    if median and one.rms is not None and one.rms > _EXPLODED * median:
        notes.append(f"norm {one.rms / median:.0f} times that of tensors like it")
    return notes

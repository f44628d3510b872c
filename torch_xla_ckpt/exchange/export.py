"""export: a checkpoint, or live tensors, as a folder of safetensors or as one file, in one pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torch_xla_ckpt import _dcp, api
from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.device import access_of, alias_of, require_kind
from torch_xla_ckpt.errors import CheckpointError, ReplacedCheckpointError
from torch_xla_ckpt.exchange.companions import companions_of, ties_by_config
from torch_xla_ckpt.exchange.from_checkpoint import CheckpointSource
from torch_xla_ckpt.exchange.from_state import ModelWriter, write_boxes, write_whole_files
from torch_xla_ckpt.exchange.layout import Layout, OutFile, OutTensor, layout_of, out_dtype, require_dtypes
from torch_xla_ckpt.exchange.local_files import LocalFiles
from torch_xla_ckpt.exchange.model_folder import LocalTarget, RemoteTarget, require_free
from torch_xla_ckpt.exchange.selection import Entry, Rename, Selection, select
from torch_xla_ckpt.exchange.ties import Pair, Ties, patterns_of
from torch_xla_ckpt.planner import SPMDSavePlanner, paths_of
from torch_xla_ckpt.reports import ExportReport
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.state import flatten, lay_out
from torch_xla_ckpt.storage import Location, PathLike, ShardReader

logger = logging.getLogger(__name__)

Format = Literal["safetensors", "torch"]
_FORMATS = ("safetensors", "torch")


@without_collector
def export(
    source: PathLike | Mapping[str, Any],
    path: PathLike,
    *,
    key: str | None = None,
    format: Format = "safetensors",
    max_shard_bytes: int = 5 << 30,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    config_from: Any = None,
    memory_budget: int = 256 << 20,
    verify: bool = True,
    progress: bool = False,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ExportReport:
    """Write a model as others read it: a Hugging Face folder of safetensors, or one ``torch.save`` file.

    Every rank writes the bytes that it holds, or its share of a checkpoint's bytes, to their final place. Nothing is
    gathered in one process. Until everything is written, nothing at the path looks like a model.

    Args:
        source: the path of a checkpoint in any format that ``load`` reads, or a state dict with live tensors. All ranks
            pass the same path, or their own state dict.
        path: the folder to make: a local path or an fsspec URL. With ``format="torch"``, or if it ends with
            ".safetensors", it is the file to make.
        key: the key of the model in the source. Default: found if the source has one model. "": the whole source.
        format: "safetensors" (default), or "torch" for one file that ``torch.load(..., weights_only=True)`` opens.
        max_shard_bytes: bytes of tensors from which the next file of a folder begins. Default: 5 GiB.
        dtype: the dtype to cast floating-point tensors to. Integers stay, and so do 8-bit floating-point tensors.
            Default: nothing is cast.
        rename: new names for names of the model, which have neither ``key`` nor wrappers' prefixes: a mapping, or a
            function that returns the new name or None.
        only: globs of the source's keys to write; default: all keys.
        exclude: globs of the source's keys to leave out.
        config_from: a folder whose configuration, tokenizer and generation files are copied, or a ``PreTrainedModel``
            whose configuration is written. Default: only weights are written.
        memory_budget: host memory in bytes for data that is being written. One tensor may exceed it. Default: 256 MiB.
        verify: check the bytes that are read against the checkpoint's checksums. Default: True.
        progress: show a progress bar on a terminal while a checkpoint is read. Needs tqdm. Default: False.
        dry_run: write nothing, and return the report of what would be written. Only for a source that is a path.
            Tensors that may be tied are read and compared. Default: False.
        storage_options: options of fsspec's filesystem for URLs, of the source and of ``path``. Default: none.
        process_group: a group whose backend gathers Python objects. Default: the default group, or none.

    Returns:
        What was written, under which names, and what was left out.

    Raises:
        ValueError: an option has a wrong value.
        CheckpointError: the path has a model already; the model's key cannot be told; a dtype is not in the format; or
            any other failure, on any rank. Nothing at the path looks like a model then.
        CorruptCheckpointError: bytes of the checkpoint are not those that were saved.
        IncompleteCheckpointError: the source does not hold every element of a tensor exactly once.
        ConcurrentSaveError: another program has written to the path meanwhile.
        ReplacedCheckpointError: another save replaced the checkpoint while it was read. Export again.
    """
    options = _Options(
        location=Location.of(path, storage_options),
        key=key,
        format=format,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        rename=rename,
        only=(only,) if isinstance(only, str) else tuple(only),
        exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
        config_from=config_from,
        memory_budget=memory_budget,
        dry_run=dry_run,
    )
    if dry_run and isinstance(source, Mapping):
        raise ValueError("dry_run=True needs the path of a checkpoint as its source")
    processes = Processes(process_group)
    if isinstance(source, Mapping):
        return _StateExport(options, processes).run(source)
    reader = ShardReader(
        source, verify=verify, memory_budget=memory_budget, progress=progress, storage_options=storage_options
    )
    return _CheckpointExport(options, processes).run(reader)


@dataclass(frozen=True)
class _Options:
    """The options of ``export``, whose docstring explains them."""

    location: Location
    key: str | None
    format: Format
    max_shard_bytes: int
    dtype: torch.dtype | None
    rename: Rename | None
    only: tuple[str, ...]
    exclude: tuple[str, ...]
    config_from: Any
    memory_budget: int
    dry_run: bool

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(f"format={self.format!r}: choose one of {', '.join(map(repr, _FORMATS))}")
        if self.max_shard_bytes <= 0 or self.memory_budget <= 0:
            raise ValueError("max_shard_bytes and memory_budget must be positive")
        if self.dtype is not None and not (self.dtype.is_floating_point and self.dtype.itemsize > 1):
            raise ValueError(f"dtype={self.dtype}: tensors are cast to floating-point dtypes of 16 bits or more only")
        if self.format == "torch" and self.config_from is not None:
            raise ValueError('config_from= writes files beside the weights, and format="torch" writes one file')

    @property
    def is_file(self) -> bool:
        """Whether the export is one file."""
        return self.format == "torch" or self.location.name.endswith(".safetensors")

    def select(self, entries: Mapping[str, Entry]) -> Selection:
        return select(entries, self.key, self.rename, self.only, self.exclude)

    def out(self, name: str, source: str, shape: Sequence[int], dtype: torch.dtype) -> OutTensor:
        return OutTensor(name, source, tuple(shape), dtype, out_dtype(dtype, self.dtype))


@dataclass(frozen=True)
class _Plan:
    """What the first rank decides for all ranks.

    Args:
        layout: the files.
        ties: names that are left out, with the name of the copy that is written.
        objects: keys in the source that hold no tensor.
        copied: names of the files beside the weights.
        parts: the folder that local files are written to; None for other stores.
    """

    layout: Layout
    ties: Mapping[str, str]
    objects: tuple[str, ...]
    copied: tuple[str, ...]
    parts: Path | None


class _Export:
    """What exports from checkpoints and of live tensors have in common.

    Args:
        options: the options of the call.
        processes: the ranks that export together.
    """

    def __init__(self, options: _Options, processes: Processes):
        self.options = options
        self.processes = processes
        self.doing = f"exporting to {options.location}"
        self.began = time.perf_counter()
        # On the first rank only.
        self._companions: dict[str, bytes] = {}
        self._target: LocalTarget | RemoteTarget | None = None
        self._layout = Layout(())

    def companions(self) -> Mapping[str, bytes]:
        """Read the files to write beside the weights."""
        self._companions = companions_of(self.options.config_from, self.options.dtype)
        return self._companions

    def ties(self, tensors: Sequence[OutTensor]) -> Ties:
        patterns = patterns_of(self.options.config_from)
        if patterns is None and not ties_by_config(self._companions):
            patterns = ()
        return Ties(tensors, patterns)

    def begin(self, tensors: Sequence[OutTensor], ties: Mapping[str, str], objects: tuple[str, ...]) -> _Plan:
        """Lay out the files, check that the path is free, and create what all ranks write to."""
        options = self.options
        written = [tensor for tensor in tensors if tensor.name not in ties]
        require_dtypes(written, options.format)
        file = options.location.name if options.is_file else None
        self._layout = layout_of(written, options.format, options.max_shard_bytes, file)
        require_free(options.location, self._layout, self._companions, is_file=options.is_file)
        parts = None
        if options.dry_run:
            return _Plan(self._layout, ties, objects, tuple(self._companions), parts)
        if options.location.is_local:
            self._target = LocalTarget(options.location, is_file=options.is_file)
            parts = self._target.parts
            for out in self._layout.files:
                self._target.make(out)
        else:
            self._target = RemoteTarget(options.location, is_file=options.is_file)
        return _Plan(self._layout, ties, objects, tuple(self._companions), parts)

    def commit(self) -> None:
        """Make everything visible; on the first rank."""
        assert self._target is not None
        self._target.commit(self._layout, self._companions)

    def abandon(self) -> None:
        """Remove what was written; on the first rank. Without effect after the commit."""
        if isinstance(self._target, LocalTarget):
            self._target.abandon()
        elif self._target is not None:
            self._target.withdraw(self._layout, self._companions)

    def report(self, plan: _Plan, bytes_read: int, bytes_written: int) -> ExportReport:
        tensors = plan.layout.tensors
        return ExportReport(
            path=self.options.location.url,
            format=self.options.format,
            files={file.name: file.size for file in plan.layout.files},
            tensors={tensor.name: tensor.source for tensor in tensors},
            tied=dict(plan.ties),
            cast={tensor.name: (tensor.saved, tensor.dtype) for tensor in tensors if tensor.saved != tensor.dtype},
            objects=plan.objects,
            copied=plan.copied,
            bytes_read=bytes_read,
            bytes_written=bytes_written,
            seconds=time.perf_counter() - self.began,
            is_dry=self.options.dry_run,
        )


class _CheckpointExport(_Export):
    """An export from a checkpoint."""

    def run(self, reader: ShardReader) -> ExportReport:
        with self.processes.agreed(self.doing):
            source = CheckpointSource(reader, self.options.memory_budget)
        versions = self.processes.gather(reader.version, self.doing)
        if len(set(versions)) > 1:
            raise ReplacedCheckpointError(
                f"the checkpoint in {reader.location} was replaced while it was read: the ranks have found different "
                "ones. Export again, with the same path on all ranks"
            )
        try:
            plan = self.processes.from_first(lambda: self._plan(source), self.doing)
            if self.options.dry_run:
                return self.report(plan, source.bytes_read, 0)
            with self.processes.agreed(self.doing):
                written = self._write(source, plan)
            self.processes.from_first(self.commit, self.doing)
        except BaseException:
            self.abandon()
            raise
        return self.report(plan, source.bytes_read, written)

    def _plan(self, source: CheckpointSource) -> _Plan:
        saved = source.metadata.state_dict_metadata
        paths = paths_of(source.metadata)
        entries = {
            key: Entry(paths.get(key, (key,)), isinstance(value, TensorStorageMetadata)) for key, value in saved.items()
        }
        selection = self.options.select({key: entries[key] for key in (*paths, *entries) if key in entries})
        tensors = []
        for name, key in selection.tensors.items():
            value = saved[key]
            assert isinstance(value, TensorStorageMetadata)
            tensors.append(self.options.out(name, key, value.size, value.properties.dtype))
        require_dtypes(tensors, self.options.format)
        self.companions()
        ties = self.ties(tensors)
        equal = {(one.name, other.name) for one, other in ties.pairs() if source.are_equal(one, other)}
        return self.begin(tensors, ties.found(equal), selection.objects)

    def _write(self, source: CheckpointSource, plan: _Plan) -> int:
        """Write this rank's share. Return the bytes of tensors that it wrote."""
        rank, ranks = self.processes.rank, self.processes.size
        if plan.parts is None:
            target = RemoteTarget(self.options.location, is_file=self.options.is_file)
            return sum(source.write_file(file, target.folder) for file in _share(plan.layout, rank, ranks))
        files = LocalFiles(plan.parts, plan.layout.files)
        try:
            source.write_share(plan.layout, files, rank, ranks)
            files.close()
        except BaseException:
            files.abandon()
            raise
        return files.bytes_written


class _StateExport(_Export):
    """An export of live tensors."""

    def run(self, state_dict: Mapping[str, Any]) -> ExportReport:
        with self.processes.agreed(self.doing):
            state = {key: _dcp.state_of(value) for key, value in state_dict.items()}
            leaves = flatten(state)
            selection = self.options.select({key: Entry(leaf.path, leaf.is_tensor) for key, leaf in leaves.items()})
            tensors = {name: leaves[key].value for name, key in selection.tensors.items()}
            outs = [
                self.options.out(name, key, tensors[name].shape, tensors[name].dtype)
                for name, key in selection.tensors.items()
            ]
            self._require_kinds(outs, tensors)
            self.companions()
            ties = self.ties(outs)
            equal = {(a.name, b.name): self._are_equal(tensors[a.name], tensors[b.name]) for a, b in ties.pairs()}
        left_out = ties.found(self._equal_everywhere(equal))
        sources = {out.name: out.source for out in outs}
        plans: list[_Plan] = []
        written: list[int] = []

        def begin(found: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> _Plan:
            if not self.options.location.is_local and self.processes.size > 1:
                raise CheckpointError(
                    f"several processes cannot export live tensors to {self.options.location}: a file there is written "
                    "by one process, and none holds all of its tensors. Nothing was written. Save a checkpoint with "
                    "torch_xla_ckpt.save, and export that"
                )
            named = [self.options.out(name, sources.get(name, name), *value) for name, value in found.items()]
            return self.begin(named, left_out, selection.objects)

        def write(plan: _Plan, items: SavePlan, planner: SavePlanner) -> None:
            plans.append(plan)
            written.append(self._write(plan, items, planner))

        writer = ModelWriter(begin, write, self.commit)
        live = {name: tensor for name, tensor in tensors.items() if name not in left_out}
        try:
            with api.readable_errors(self.processes, self.doing, "exported"):
                _dcp.save(live, writer, SPMDSavePlanner(), self.processes.group, self.processes.alone)
        except BaseException:
            self.abandon()
            raise
        return self.report(plans[0], 0, written[0])

    def _write(self, plan: _Plan, items: SavePlan, planner: SavePlanner) -> int:
        if plan.parts is None:
            target = RemoteTarget(self.options.location, is_file=self.options.is_file)
            return write_whole_files(plan.layout, target.folder, items.items, planner)
        files = LocalFiles(plan.parts, plan.layout.files)
        try:
            write_boxes(files, items.items, planner, self.options.memory_budget)
            files.close()
        except BaseException:
            files.abandon()
            raise
        return files.bytes_written

    def _require_kinds(self, outs: Sequence[OutTensor], tensors: Mapping[str, torch.Tensor]) -> None:
        """Check dtypes and kinds of all tensors.

        Raises:
            CheckpointError: naming all keys that cannot be written.
        """
        problems = []
        for out in outs:
            try:
                require_kind(tensors[out.name])
                if tensors[out.name].device.type == "meta":
                    raise CheckpointError("a tensor on the meta device has no values")
            except CheckpointError as error:
                problems.append(f"{out.source!r}: {error}")
        if problems:
            raise CheckpointError(
                "these tensors cannot be exported:\n  " + "\n  ".join(problems) + "\nNothing was written"
            )
        require_dtypes(outs, self.options.format)

    def _are_equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Compare the parts of two tensors that this process holds."""
        if alias_of(one) == alias_of(other):
            return True
        first, second = lay_out({"a": one, "b": other}, access_of).values()
        if first.layout.boxes != second.layout.boxes:
            return False
        for part in sorted(set(first.layout.parts.values())):
            a, b = (held.access.fetch(held.tensor, held.layout, part) for held in (first, second))
            if any(not _same_bits(a[box], b[box]) for box in a):
                return False
        return True

    def _equal_everywhere(self, own: Mapping[Pair, bool]) -> set[Pair]:
        """Return the pairs that are equal on every rank that has them."""
        votes = self.processes.gather(dict(own), self.doing)
        pairs = {pair for vote in votes for pair in vote}
        return {pair for pair in pairs if all(vote.get(pair, True) for vote in votes)}


def _share(layout: Layout, rank: int, ranks: int) -> list[OutFile]:
    """Return the files that a rank writes: each rank gets about as many bytes."""
    load = [0] * ranks
    own = []
    for file in sorted(layout.files, key=lambda file: -file.size):
        writer = load.index(min(load))
        load[writer] += file.size
        if writer == rank:
            own.append(file)
    return own


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = (one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b))
    return torch.equal(*raw)

"""What exports from checkpoints and exports of live tensors have in common."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_xla_ckpt.coordination import Processes
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.exchange.casting import Casts, warn_of_overflow
from torch_xla_ckpt.exchange.companions import companions_of, ties_by_config
from torch_xla_ckpt.exchange.free_path import require_apart
from torch_xla_ckpt.exchange.layout import Layout, OutFile, OutTensor, layout_of, require_dtypes
from torch_xla_ckpt.exchange.local_files import LocalFiles
from torch_xla_ckpt.exchange.model_folder import Target, remote_folder, target_of
from torch_xla_ckpt.exchange.options import Options
from torch_xla_ckpt.exchange.selection import Selection
from torch_xla_ckpt.exchange.streamed_files import StreamedFiles
from torch_xla_ckpt.exchange.ties import Ties, patterns_of
from torch_xla_ckpt.formats import METADATA
from torch_xla_ckpt.reports import ExportReport
from torch_xla_ckpt.storage import Location, followed


@dataclass(frozen=True)
class Plan:
    """What the first rank decides for all ranks.

    Args:
        layout: the files.
        ties: names that are tied to another tensor, with the name of the copy that is written.
        objects: keys in the source that hold no tensor.
        unselected: keys in the source of tensors outside of the export.
        copied: names of the files beside the weights.
        parts: the folder that local files are written to; None for other stores.
    """

    layout: Layout
    ties: Mapping[str, str]
    objects: tuple[str, ...]
    unselected: tuple[str, ...]
    copied: tuple[str, ...]
    parts: Path | None


class Job:
    """One export.

    Args:
        options: the options of the call.
        processes: the ranks that export together.
        source: the checkpoint that is exported. None for live tensors.
    """

    def __init__(self, options: Options, processes: Processes, source: Location | None = None):
        self.options = options
        self._source = source
        self.processes = processes
        self.doing = f"exporting to {options.location}"
        self._began = time.perf_counter()
        self._casts = Casts()
        # On the first rank only.
        self._companions: Mapping[str, bytes] = {}
        self._target: Target | None = None

    def read_companions(self) -> None:
        """Read the files to write beside the weights."""
        options = self.options
        self._companions = companions_of(options.config_from, options.dtype, options.storage_options)

    def ties(self, tensors: Sequence[OutTensor]) -> Ties:
        """Return the search for tied weights among the tensors. The companions must have been read."""
        patterns = patterns_of(self.options.config_from)
        if patterns is None and not ties_by_config(self._companions):
            patterns = ()
        return Ties(tensors, patterns)

    def begin(
        self,
        tensors: Sequence[OutTensor],
        ties: Mapping[str, str],
        selection: Selection,
        texts: Mapping[str, str] | None = None,
    ) -> Plan:
        """Lay out the files, check that the path is free, and create what all ranks write to; on the first rank.

        Args:
            tensors: the tensors.
            ties: names that are tied to another tensor, with the name of that tensor.
            selection: what is exported.
            texts: the texts under ``__metadata__`` in the source. Default: none.
        """
        options = self.options
        texts = texts or {}
        objects = selection.objects
        if texts and options.format == "torch":
            objects = (*objects, METADATA)
        written = [tensor for tensor in tensors if tensor.name not in ties]
        require_dtypes(written, options.format)
        target = followed(options.location) if options.is_file else options.location
        if self._source is not None:
            require_apart(self._source, target)
        file = options.location.name if options.is_file else None
        layout = layout_of(written, options.format, options.max_shard_bytes, file, ties, texts)
        self._target = target_of(target, layout, self._companions, is_file=options.is_file)
        if options.dry_run:
            self._target.require_free()
        else:
            self._target.begin()
        selection.warn_of_rest()
        return Plan(layout, ties, objects, selection.unselected, tuple(self._companions), self._target.parts)

    def open_parts(self, plan: Plan) -> LocalFiles:
        """Open the local files, which the first rank has created.

        Raises:
            CheckpointError: this host does not see them.
        """
        assert plan.parts is not None
        if not plan.parts.is_dir():
            raise CheckpointError(
                f"this host does not see {plan.parts}, which the first rank has created. All ranks write to the same "
                "files. Export to a file system that all hosts share, or to an object store"
            )
        return LocalFiles(plan.parts, plan.layout.files, self._casts)

    def streamed(self, files: Sequence[OutFile]) -> StreamedFiles:
        """Return the files of a store that this rank writes."""
        folder = remote_folder(self.options.location, is_file=self.options.is_file)
        return StreamedFiles(folder, files, replaces=self.options.is_file, casts=self._casts)

    def commit(self) -> None:
        """Make everything visible; on the first rank."""
        assert self._target is not None
        self._target.commit()
        self._target = None

    def abandon(self) -> None:
        """Remove what was written. Without effect after the commit, and on other ranks than the first."""
        if self._target is not None:
            self._target.abandon()

    def report(self, plan: Plan, bytes_read: int, bytes_written: int) -> ExportReport:
        """Return the report of the export, and warn of values that overflowed. All ranks call this together.

        Args:
            plan: what was written.
            bytes_read, bytes_written: what this process has read and written.
        """
        tensors = plan.layout.tensors
        overflowed: Counter[str] = Counter()
        if any(tensor.saved != tensor.dtype for tensor in tensors):
            overflowed = sum(self.processes.gather(self._casts.overflowed, self.doing), overflowed)
        if self.processes.rank == 0:
            warn_of_overflow(overflowed, self.options.dtype)
        return ExportReport(
            path=self.options.location.url,
            format=self.options.format,
            files={file.name: file.size for file in plan.layout.files},
            tensors={tensor.name: tensor.source for tensor in tensors},
            tied=dict(plan.ties),
            cast={tensor.name: (tensor.saved, tensor.dtype) for tensor in tensors if tensor.saved != tensor.dtype},
            overflowed={tensor.name: overflowed[tensor.name] for tensor in tensors if overflowed[tensor.name]},
            objects=plan.objects,
            unselected=plan.unselected,
            copied=plan.copied,
            bytes_read=bytes_read,
            bytes_written=bytes_written,
            is_dry=self.options.dry_run,
            seconds=time.perf_counter() - self._began,
        )

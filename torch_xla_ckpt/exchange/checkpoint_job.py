"""Exports from a checkpoint: the first rank plans, and every rank writes its share."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torch_xla_ckpt.errors import ReplacedCheckpointError
from torch_xla_ckpt.exchange.from_checkpoint import CheckpointSource
from torch_xla_ckpt.exchange.job import Job, Plan
from torch_xla_ckpt.exchange.layout import require_dtypes, shares_of
from torch_xla_ckpt.exchange.selection import Entry
from torch_xla_ckpt.planner import paths_of
from torch_xla_ckpt.reports import ExportReport
from torch_xla_ckpt.storage import ShardReader, require_undamaged


class CheckpointJob(Job):
    """An export from a checkpoint."""

    def run(self, reader: ShardReader, *, verify: bool) -> ExportReport:
        """Export the checkpoint that a reader reads.

        Args:
            reader: the reader.
            verify: whether to check a source of another format before it is read.
        """
        with self.processes.agreed(self.doing):
            source = CheckpointSource(reader, self.options.memory_budget)
        versions = self.processes.gather(reader.version, self.doing)
        if len(set(versions)) > 1:
            raise ReplacedCheckpointError(
                f"the checkpoint in {reader.location} was replaced while it was read: the ranks have found different "
                "ones. Nothing was exported. Export again, with the same path on all ranks"
            )
        try:
            if verify and reader.is_foreign and not self.options.dry_run:
                self.processes.from_first(lambda: require_undamaged(reader.location), self.doing)
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

    def _plan(self, source: CheckpointSource) -> Plan:
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
        self.read_companions()
        ties = self.ties(tensors)
        equal = {(one.name, other.name) for one, other in ties.pairs() if source.are_equal(one, other)}
        return self.begin(tensors, ties.found(equal), selection, source.texts)

    def _write(self, source: CheckpointSource, plan: Plan) -> int:
        """Write this rank's share. Return the bytes of tensors that it wrote."""
        rank, ranks = self.processes.rank, self.processes.size
        if plan.parts is None:
            out = self.streamed(shares_of(plan.layout, ranks)[rank])
            source.write_files(out)
            return sum(tensor.nbytes for tensor in out.tensors)
        files = self.open_parts(plan)
        try:
            source.write_share(plan.layout, files, rank, ranks)
            files.close()
        except BaseException:
            files.abandon()
            raise
        return files.bytes_written

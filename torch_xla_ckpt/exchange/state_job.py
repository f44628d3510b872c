"""Exports of live tensors: every rank writes the boxes that it holds, as in a save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torch_xla_ckpt import _dcp, api
from torch_xla_ckpt.device import access_of, alias_of, require_kind
from torch_xla_ckpt.errors import CheckpointError
from torch_xla_ckpt.exchange.bits import same_bits
from torch_xla_ckpt.exchange.from_hosts import write_whole_files
from torch_xla_ckpt.exchange.from_state import ModelWriter, write_boxes
from torch_xla_ckpt.exchange.job import Job, Plan
from torch_xla_ckpt.exchange.layout import OutTensor, require_dtypes, shares_of
from torch_xla_ckpt.exchange.selection import Entry
from torch_xla_ckpt.exchange.ties import Pair
from torch_xla_ckpt.planner import SPMDSavePlanner
from torch_xla_ckpt.reports import ExportReport
from torch_xla_ckpt.state import flatten, lay_out


class StateJob(Job):
    """An export of live tensors."""

    def run(self, state_dict: Mapping[str, Any]) -> ExportReport:
        """Export the tensors of a state dict."""
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
            self.read_companions()
            ties = self.ties(outs)
            equal = {(a.name, b.name): _are_equal(tensors[a.name], tensors[b.name]) for a, b in ties.pairs()}
        left_out = ties.found(self._equal_everywhere(equal))
        sources = {out.name: out.source for out in outs}
        plans: list[Plan] = []
        written: list[int] = []

        def begin(found: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Plan:
            named = [self.options.out(name, sources.get(name, name), *value) for name, value in found.items()]
            return self.begin(named, left_out, selection)

        def write(plan: Plan, items: SavePlan, planner: SavePlanner) -> None:
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

    def _write(self, plan: Plan, items: SavePlan, planner: SavePlanner) -> int:
        """Write this rank's share. Return the bytes of tensors that it wrote."""
        budget = self.options.memory_budget
        if plan.parts is None:
            shares = shares_of(plan.layout, self.processes.size)
            out = self.streamed(shares[self.processes.rank])
            write_whole_files(out, shares, items.items, planner, self.processes, self.doing, budget)
            return sum(tensor.nbytes for tensor in out.tensors)
        files = self.open_parts(plan)
        try:
            write_boxes(files, items.items, planner, budget)
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

    def _equal_everywhere(self, own: Mapping[Pair, bool]) -> set[Pair]:
        """Return the pairs that are equal on every rank that has them."""
        votes = self.processes.gather(dict(own), self.doing)
        pairs = {pair for vote in votes for pair in vote}
        return {pair for pair in pairs if all(vote.get(pair, True) for vote in votes)}


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare the parts of two tensors that this process holds. Tensors that are cut differently count as different."""
    if alias_of(one) == alias_of(other):
        return True
    first, second = lay_out({"a": one, "b": other}, access_of).values()
    if first.layout.boxes != second.layout.boxes:
        return False
    for part in sorted(set(first.layout.parts.values())):
        a, b = (held.access.fetch(held.tensor, held.layout, part) for held in (first, second))
        if any(not same_bits(a[box], b[box]) for box in a):
            return False
    return True

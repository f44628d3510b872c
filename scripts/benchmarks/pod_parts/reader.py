"""A host of a simulated pod that plans the load of its own boxes from a checkpoint. A process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from benchmarks.pod_parts.measuring import Phases, memory
from benchmarks.pod_parts.simulated import Pod
from torch_xla_ckpt.planner import SPMDLoadPlanner, ongoing
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.storage import ShardReader
from torch_xla_ckpt.storage.read_plan import planned_bytes


def main(pod: Pod, path: Path) -> None:
    """Plan a load three times, and print what each took as a line of JSON."""
    state = pod.state()
    for _ in range(3):
        start = memory("VmRSS")
        phases = Phases()
        with mock.patch.object(ongoing, "require_targets"):  # tensors of a simulated pod lie on the meta device
            plan, metadata = phases.run("plan", _planned, pod, path, state)
        phases.run("order of reads", planned_bytes, plan.items, metadata)
        _check(pod, plan)
        line = {"seconds": phases.seconds, "processor": phases.processor, "memory": memory("VmRSS") - start}
        print(json.dumps(line), flush=True)


@without_collector
def _planned(pod: Pod, path: Path, state: dict[str, Any]) -> tuple[LoadPlan, Metadata]:
    reader, planner = ShardReader(path), SPMDLoadPlanner(access=pod.access(0, state))
    metadata = reader.read_metadata()
    planner.set_up_planner({"model": state["model"]}, metadata)
    reader.set_up_storage_reader(metadata, True)
    return planner.create_local_plan(), metadata


def _check(pod: Pod, plan: LoadPlan) -> None:
    """Check that the plan reads each element of the host's boxes once."""
    expected = pod.chips * sum(pod.shape(number)[0] * pod.shape(number)[1] // pod.cuts for number in range(pod.tensors))
    found = sum(item.lengths.numel() for item in plan.items)
    places = {(item.dest_index, item.dest_offsets) for item in plan.items}
    if found != expected or len(places) != len(plan.items):
        raise SystemExit(f"the load plan reads {found} elements, and the host needs {expected}")


if __name__ == "__main__":
    main(Pod(*map(int, sys.argv[2:6])), Path(sys.argv[1]))

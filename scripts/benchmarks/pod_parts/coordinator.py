"""The coordinator of a simulated pod: plans saves, and writes their records. A process of its own, so that its memory
can be measured.

Its work is what DCP makes it do, from the plans as they arrive to the metadata as DCP sends it. Data files are not
written; the test suite does that with real processes.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint.metadata import Metadata

from benchmarks.pod_parts.checks import check_incomplete, check_records
from benchmarks.pod_parts.measuring import Phases, floor, memory
from benchmarks.pod_parts.simulated import Pod, next_plan, written
from torch_xla_ckpt.planner import SPMDSavePlanner
from torch_xla_ckpt.runtime import without_collector
from torch_xla_ckpt.storage import ShardWriter
from torch_xla_ckpt.storage.commit_checks import Candidate

SAVES = 3
COPY = "torch's copy"  # a phase


def main(pod: Pod, work: Path, checked: bool) -> None:
    """Save a few times, and print what each save took as a line of JSON."""
    state = pod.state()
    gc.collect()
    start = memory("VmRSS")
    for number in range(SAVES):
        phases = Phases()
        planner = SPMDSavePlanner(access=pod.access(0, state))
        planner.set_up_planner(state)
        writer = ShardWriter(work / "checkpoint", sync=False)
        writer.set_up_storage_writer(True)
        own = writer.prepare_local_plan(planner.create_local_plan())
        # No data file is written, so none can be found at the commit.
        with mock.patch.object(Candidate, "require_files"):
            metadata = _save(pod, work, planner, writer, own, phases, number)
        line = {
            "seconds": phases.seconds,
            "processor": phases.processor,
            "pauses": phases.pauses,
            "memory": memory("VmHWM") - start,
            "balance": _balance(writer),
            "sent": len(pickle.dumps(own)),
            "floor": floor(work / "checkpoint", work / "floor"),
        }
        print(json.dumps(line), flush=True)
        if checked and number == SAVES - 1:  # it uses what the saves before it have kept
            check_records(work / "checkpoint", metadata)
    if checked:
        plans = _gathered(work, "plan", pod.hosts)
        check_incomplete([plan for host, plan in enumerate(plans) if host % pod.distinct_hosts], planner)


@without_collector
def _save(
    pod: Pod, work: Path, planner: SPMDSavePlanner, writer: ShardWriter, own: Any, phases: Phases, number: int
) -> Metadata:
    plans = phases.run("gather plans", _gathered, work, "plan", pod.hosts)
    plans[0] = own
    plans, metadata = phases.run("plan and proof", planner.create_global_plan, plans)
    plans = phases.run("prepare", writer.prepare_global_plan, plans)
    phases.run("scatter", _scattered, plans)
    save_id = plans[0].storage_data.save_id
    planner.finish_plan(pickle.loads(pickle.dumps(plans[0])))
    if os.fork() == 0:  # the memory of the other hosts' part is not the coordinator's
        for host, plan in enumerate(plans):
            (work / f"result{host}").write_bytes(pickle.dumps(written(plan.items, host, save_id, number)))
            (work / f"plan{host}").write_bytes(next_plan((work / f"plan{host}").read_bytes(), pickle.dumps(plan)))
        os._exit(0)
    os.wait()
    plans.clear()
    results = phases.run("gather results", _gathered, work, "result", pod.hosts)
    phases.run("records", writer.finish, metadata, results)
    message = phases.run("broadcast", pickle.dumps, metadata)
    phases.run(COPY, _as_tensor, message)
    return metadata


def _gathered(work: Path, name: str, hosts: int) -> list[Any]:
    return [pickle.loads((work / f"{name}{host}").read_bytes()) for host in range(hosts)]


def _scattered(plans: list[Any]) -> None:
    for plan in plans:
        pickle.dumps(plan)


def _as_tensor(message: bytes) -> torch.Tensor:
    """Copy a message as torch does before a process group sends it. That takes Python's lock for the whole copy."""
    return torch.ByteTensor(torch.ByteStorage._from_buffer(message))


def _balance(writer: ShardWriter) -> float:
    """Return the bytes of the host that writes most, divided by the mean."""
    folder = Path(writer.checkpoint_id)
    manifest = json.loads(next(folder.glob("manifest-*.json")).read_bytes())
    sizes = [size for _, size in manifest["files"]]
    return max(sizes) * len(sizes) / sum(sizes)


if __name__ == "__main__":
    main(Pod(*map(int, sys.argv[3:7])), Path(sys.argv[1]), sys.argv[2] == "checked")

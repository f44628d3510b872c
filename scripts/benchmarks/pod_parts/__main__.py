"""Saves and loads of a pod, simulated on one machine: what the coordinator and one host need for planning.

Each row is a pod. Hosts are simulated: their plans are made by the real planner, one host after the other, pickled as a
process group would, and read by a coordinator in a process of its own. All results are checked; see ``checks``.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pod_parts.simulated import Pod
from torch_xla_ckpt.planner import SPMDSavePlanner
from torch_xla_ckpt.storage import ShardWriter

PODS = {
    "256 hosts, 1,000 tensors": Pod(256),
    "256 hosts, 3,000 tensors, 64 replicas": Pod(256, tensors=3000, replicas=64),
    "4,096 hosts, 1,000 tensors": Pod(4096),
}
CHECKED = 2_000_000  # chunks up to which every chunk is compared one by one, as DCP's objects


def send_plans(pod: Pod, work: Path) -> None:
    """Write the plan that each host would send."""
    state = pod.state()
    for host in range(pod.hosts):
        planner = SPMDSavePlanner(access=pod.access(host, state))
        planner.set_up_planner(state)
        plan = ShardWriter(work / "checkpoint", sync=False).prepare_local_plan(planner.create_local_plan())
        (work / f"plan{host}").write_bytes(pickle.dumps(plan))


def measured(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Return what a process of this benchmark printed, a dict for each line."""
    command = [sys.executable, "-m", f"benchmarks.pod_parts.{module}", *arguments]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def measure(pod: Pod) -> dict[str, Any]:
    """Return the figures of one pod."""
    shape = [str(number) for number in (pod.hosts, pod.chips, pod.tensors, pod.replicas)]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        send_plans(pod, work)
        first, *later = measured("coordinator", folder, "checked" if pod.chunks <= CHECKED else "-", *shape)
        loads = measured("reader", str(work / "checkpoint"), *shape)
        sizes = {path.name.partition("-")[0]: path.stat().st_size for path in (work / "checkpoint").iterdir()}
    again = [sum(save["seconds"].values()) for save in later]
    pauses = [pause for save in (first, *later) for pause in save["pauses"].values()]
    return {
        "chunks": pod.chunks,
        "first": sum(first["seconds"].values()),
        "second": min(again),
        "memory": later[-1]["memory"],
        "pause": max(pauses),
        "balance": first["balance"],
        "plan_bytes": first["sent"],
        "metadata_bytes": sizes[".metadata"],
        "manifest_bytes": sizes["manifest"],
        "load": statistics.median(sum(load["seconds"].values()) for load in loads),
        "phases": {"first": first, "later": later, "loads": loads},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure only pods whose name contains this text")
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    table = Table(title="coordinator and one host of a simulated pod (seconds on this machine)")
    names = ("pod", "chunks", "first save", "second save", "memory", "longest pause", "load plan", "most loaded / mean")
    for name in names:
        table.add_column(name, justify="left" if name == "pod" else "right")
    results = {}
    for name, pod in PODS.items():
        if options.only not in name:
            continue
        found = results[name] = measure(pod)
        table.add_row(
            name,
            f"{found['chunks']:,}",
            f"{found['first']:.2f} s",
            f"{found['second']:.2f} s",
            f"{found['memory'] / 1024:.2f} GiB",
            f"{1000 * found['pause']:.0f} ms",
            f"{found['load']:.2f} s",
            f"{found['balance']:.3f}",
        )
    Console().print(table)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()

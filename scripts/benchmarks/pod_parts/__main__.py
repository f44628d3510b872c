"""Saves and loads of a pod, simulated on one machine: what the coordinator and one host need for planning.

Each row is a pod. Hosts are simulated: their plans are made by the real planner, one host after the other, pickled as a
process group would, and read by a coordinator in a process of its own. All results are checked; see ``checks``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.pod_parts.coordinator import COPY
from benchmarks.pod_parts.pictures import draw
from benchmarks.pod_parts.simulated import Pod
from torch_xla_ckpt.planner import SPMDSavePlanner
from torch_xla_ckpt.storage import ShardWriter

PODS = {
    "1,024 chips, 3,000 tensors, 64 replicas": Pod(256, tensors=3000, replicas=64),
    **{f"{hosts * 4:,} chips": Pod(hosts) for hosts in (2, 16, 64, 256, 1024, 4096)},
}
CHECKED = 2_000_000  # chunks up to which every chunk is compared one by one, as DCP's objects


def send_plans(pod: Pod, work: Path) -> None:
    """Write the plan that each host would send."""
    with multiprocessing.get_context("fork").Pool() as pool:
        for _ in pool.imap_unordered(partial(send_plan, pod, pod.state(), work), range(pod.hosts), chunksize=16):
            pass


def send_plan(pod: Pod, state: dict[str, Any], work: Path, host: int) -> None:
    """Write the plan that one host would send."""
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
    saves = (first, *later)
    second = min(later, key=lambda save: sum(save["processor"].values()))
    floor = min(save["floor"] for save in saves)
    load = sorted(loads, key=lambda one: sum(one["processor"].values()))[len(loads) // 2]
    return {
        "chips": pod.hosts * pod.chips,
        "chunks": pod.chunks,
        **{
            name: {"seconds": sum(one["seconds"].values()), "processor": sum(one["processor"].values())}
            for name, one in (("first", first), ("second", second), ("load", load))
        },
        "memory": max(save["memory"] for save in saves),
        "pause": statistics.median(max(_pauses(save)) for save in saves),
        "copy": statistics.median(save["pauses"][COPY] for save in saves),
        "floor": floor,
        "balance": first["balance"],
        "plan_bytes": first["sent"],
        "metadata_bytes": sizes[".metadata"],
        "manifest_bytes": sizes["manifest"],
        "phases": {"first": first, "later": later, "loads": loads},
    }


def _pauses(save: dict[str, Any]) -> list[float]:
    """Return the longest pause of each phase of this package."""
    return [seconds for phase, seconds in save["pauses"].items() if phase != COPY]


def duration(found: dict[str, float]) -> str:
    """Return seconds, and the processor time behind them in parentheses."""
    return f"{found['seconds']:.2f} s ({found['processor']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure only pods whose name contains this text")
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument("--picture", help="draw how the times grow with the pod into this PNG file")
    options = parser.parse_args()
    table = Table(title="coordinator and one host of a simulated pod: seconds (and processor time)")
    names = ["pod", "chunks", "first save", "second save", "second / first", "floor", "second / floor"]
    names += ["memory", "longest pause", COPY, "load plan", "most loaded / mean"]
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
            *(duration(found[one]) for one in ("first", "second")),
            f"{100 * found['second']['seconds'] / found['first']['seconds']:.0f} %",
            f"{found['floor']:.3f} s",
            f"{found['second']['seconds'] / found['floor']:.1f}",
            f"{found['memory'] / 1024:.2f} GiB",
            *(f"{1000 * found[name]:.0f} ms" for name in ("pause", "copy")),
            duration(found["load"]),
            f"{found['balance']:.3f}",
        )
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=2))
    Console(width=max(200, Console().width)).print(table)
    if options.picture:
        draw([found for name, found in results.items() if PODS[name].replicas == 1], Path(options.picture))


if __name__ == "__main__":
    main()

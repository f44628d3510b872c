"""The host memory that an async save takes beside the state, for ``scripts/benchmarks/async_saves``; in bytes.

Runs in a new process, because a process may keep memory that it has freed. Virtual devices use host memory, too. So
for our side only fetching and writing are counted, not the copy on the devices.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from benchmarks.async_parts.sides import TorchXla, Training, settle
from benchmarks.storage_parts.memory import Peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("torch_xla", "ours"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, required=True, help="size of the state in bytes")
    parser.add_argument("--budget", type=int, required=True, help="our memory_budget in bytes")
    options = parser.parse_args()
    training = Training(options.size)
    training.step()
    settle()
    if options.side == "torch_xla":
        theirs = TorchXla(options.folder)
        with Peak() as peak:
            theirs.save(0, training.state())
            theirs.finish()
    else:
        with xc.SPMDStager("device") as stager:
            staged = stager.stage(training.state())
            settle()
            writer = xc.ShardWriter(options.folder / "ours", sync=False, memory_budget=options.budget)
            with Peak() as peak:
                dcp.save(staged.result(), storage_writer=writer, planner=xc.SPMDSavePlanner(), no_dist=True)
    print(peak.anonymous)


if __name__ == "__main__":
    main()

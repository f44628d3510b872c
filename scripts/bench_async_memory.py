"""How much host memory a save in the background takes above the state's, for ``bench_async``; printed in bytes.

A process of its own, because memory that a process has freed may still be its own. Virtual devices are host memory as
well, so of ours only what comes after the copy on the devices is counted: fetching and writing it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed.checkpoint as dcp
from bench_async_sides import TorchXla, Training, settle
from bench_storage_memory import Peak

import torch_xla_ckpt as xc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("torch_xla", "ours"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, required=True, help="of the state, in bytes")
    parser.add_argument("--budget", type=int, required=True, help="the memory_budget of ours, in bytes")
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

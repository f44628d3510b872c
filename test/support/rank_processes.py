"""Ranks as processes without devices, for scenarios that a test module defines."""

import importlib.util
import inspect
import logging
import os
import traceback
from datetime import timedelta

import torch.distributed as dist

from support.programs import PROCESSES
from torch_xla_ckpt import coordination


def run(scenario, folder, world=2, *arguments):
    """Run a function of a test module in every rank; fails with what a rank fails with."""
    queue = PROCESSES.SimpleQueue()
    rendezvous = f"{folder}/rendezvous-{scenario.__name__}"
    # pytest imports test modules by path, so a child cannot import them by name.
    named = inspect.getfile(scenario), scenario.__name__
    ranks = [
        PROCESSES.Process(
            target=_rank, args=(*named, rank, world, rendezvous, str(folder), queue, arguments), daemon=True
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(100)
            assert not rank.is_alive(), "a rank hangs"
    finally:
        for rank in ranks:
            rank.kill()
    said = [queue.get() for _ in ranks]
    assert not any(said), "\n".join(said)


def _rank(file, scenario, rank, world, rendezvous, folder, queue, arguments):
    logging.getLogger("torch_xla_ckpt").setLevel(logging.ERROR)
    coordination._PATIENCE = 1.0
    said = ""
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        spec = importlib.util.spec_from_file_location("scenarios_of_ranks", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        getattr(module, scenario)(rank, world, folder, *arguments)
    except BaseException:
        said = f"rank {rank} of {world} in {scenario}:\n{traceback.format_exc()}"
    queue.put(said)
    os._exit(0)

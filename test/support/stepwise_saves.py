"""Saves that a test takes step by step, so that another program may do anything in between."""

import torch

import torch_xla_ckpt as xc
from torch_xla_ckpt.storage.folders import open_folder
from torch_xla_ckpt.storage.location import Location


def steps_of(path, options, value, rank=None):
    """The steps of one save, each as DCP makes them; another program may do anything between two of them.

    With a ``rank`` it is the save of this rank alone, without collectives.
    """
    writer = xc.ShardWriter(path, sync=False, threads=1, storage_options=options)
    planner = xc.SPMDSavePlanner()
    planner.set_up_planner({"t": torch.full((100,), value)}, writer.storage_meta(), True)
    writer.set_up_storage_writer(True, **({} if rank is None else {"rank": rank, "use_collectives": False}))
    plan = writer.prepare_local_plan(planner.create_local_plan())
    yield writer
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    writer._beginning.wait()
    yield writer
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    yield writer
    writer.finish(metadata, [results])


def value_at(path, options):
    """What the checkpoint holds; None if there is none."""
    state = {"t": torch.zeros(100)}
    try:
        xc.load(state, storage_reader=xc.ShardReader(path, storage_options=options))
    except xc.CheckpointError as error:
        assert "there is no checkpoint" in str(error), error
        return None
    assert len(state["t"].unique()) == 1
    return float(state["t"][0])


def files_at(path, options):
    return set(open_folder(Location.of(path, options)).names())

"""Write one golden checkpoint: a small one that every later version of this package must open.

    python test/golden/write.py KIND FOLDER

The kinds and the software that wrote each golden checkpoint are listed in README.md beside this file. The program runs
with old commits of this package too, so it uses only what they had.
"""

import os
import sys

import torch
import torch.distributed.checkpoint as dcp


def values():
    """The tensors of the model; the same on every machine and with every torch."""
    return {
        "layers.0.weight": torch.arange(128.0).reshape(16, 8),
        "layers.0.bias": torch.arange(8.0).bfloat16(),
        "layers.1.weight": torch.arange(1000, 1039).reshape(3, 13),
        "scale": torch.tensor(2.5),
    }


def rest():
    """What is saved beside the model."""
    momentum = {0: {"exp_avg": torch.arange(128.0).reshape(16, 8) / 8, "step": torch.tensor(3.0)}}
    return {"step": 7, "name": "golden", "optim": {"state": momentum, "param_groups": [{"lr": 0.1, "params": [0]}]}}


def on_devices():
    """The model on eight virtual devices, every tensor tiled or replicated."""
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))
    model = {key: value.to("xla") for key, value in values().items()}
    xs.mark_sharding(model["layers.0.weight"], mesh, ("a", "b"))
    xs.mark_sharding(model["layers.1.weight"], mesh, (None, ("a", "b")))
    xs.mark_sharding(model["layers.0.bias"], mesh, (("a", "b"),))
    torch_xla.sync()
    return {"model": model, **rest()}


def planners(folder):
    """This package's planner with stock DCP storage: the first commits had nothing else."""
    import torch_xla_ckpt as xc

    dcp.save(on_devices(), checkpoint_id=folder, planner=xc.SPMDSavePlanner())


def writer(folder):
    """This package's planner and storage."""
    import torch_xla_ckpt as xc

    dcp.save(on_devices(), storage_writer=xc.ShardWriter(folder), planner=xc.SPMDSavePlanner())


def packed(folder):
    """This package's planner and storage, with one tensor in so many chunks that the manifest packs them."""
    import torch_xla_ckpt as xc
    from torch_xla_ckpt.device import access_of
    from torch_xla_ckpt.layout import Box, Shard, TensorLayout

    class CutAccess(type(access_of(torch.empty(0)))):
        def layout(self, tensor):
            if tuple(tensor.shape) != (16, 8):
                return super().layout(tensor)
            shards = tuple(Shard(Box((a, b), (1, 2)), "cpu") for a in range(16) for b in range(0, 8, 2))
            return TensorLayout((16, 8), tensor.dtype, shards, (1, 2), "rows and columns", True)

        def fetch(self, tensor, layout, part=0):
            return {box: tensor[box.slices] for box in layout.boxes}

    planner = xc.SPMDSavePlanner(access=lambda tensor: CutAccess())
    dcp.save({"model": values(), **rest()}, storage_writer=xc.ShardWriter(folder), planner=planner)


def torch_xla_planners(folder):
    import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint

    dcp.save(on_devices(), checkpoint_id=folder, planner=torch_xla_checkpoint.SPMDSavePlanner(), no_dist=True)


def torch_xla_manager(folder):
    """The folder of a run; the checkpoint is the step in it."""
    import torch.distributed as dist
    import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint

    dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=0, world_size=1)
    state = on_devices()
    manager = torch_xla_checkpoint.CheckpointManager(folder, save_interval=1, chkpt_on_preemption=False)
    manager.save(7, state, force=True)


def stock(folder):
    dcp.save({"model": values(), **rest()}, checkpoint_id=folder, no_dist=True)


def stock_fsdp2(folder):
    """Two ranks, each with half of every parameter."""
    torch.multiprocessing.spawn(_fsdp2_rank, (folder,), nprocs=2)


def _fsdp2_rank(rank, folder):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=2)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    for key, value in values().items():
        owner, _, name = key.rpartition(".")
        trained = torch.nn.Parameter(value, requires_grad=value.is_floating_point())
        model.get_submodule(owner).register_parameter(name, trained)
    # FSDP2 refuses integers and tensors without dimensions.
    frozen = {value for value in model.parameters() if not value.ndim or not value.is_floating_point()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=frozen)
    dcp.save({"model": model.state_dict(), **rest()}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](os.path.abspath(sys.argv[2]))

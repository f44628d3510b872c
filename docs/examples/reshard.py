"""Save on one mesh, load on other meshes and in host memory, and check every element.

    python docs/examples/reshard.py

Runs on eight virtual CPU devices unless the environment names others.
"""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")

import tempfile

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

import torch_xla_ckpt as xc

SHAPES = {"weight": (100, 37), "bias": (37,)}  # not divisible by the mesh: some shards are smaller, or padded


def sharded(mesh_shape, values):
    """Return the values as tensors on a mesh: the matrix tiled, the vector replicated along one axis."""
    mesh = xs.Mesh(np.arange(8), mesh_shape, ("x", "y"))
    tensors = {name: value.to("xla") for name, value in values.items()}
    xs.mark_sharding(tensors["weight"], mesh, ("x", "y"))
    xs.mark_sharding(tensors["bias"], mesh, ("y",))
    torch_xla.sync()
    return tensors


def main():
    xr.use_spmd()
    values = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "checkpoint")
        xc.save({"model": sharded((4, 2), values), "step": 7}, path)

        for mesh_shape in ((4, 2), (2, 4), (8, 1), (1, 8)):
            state = {"model": sharded(mesh_shape, zeros), "step": 0}
            report = xc.load(state, path)  # in place; each tensor keeps the sharding of its own mesh
            for name, value in values.items():
                assert torch.equal(state["model"][name].cpu(), value), f"{name} on {mesh_shape}"
            assert state["step"] == 7
            print(f"mesh {mesh_shape}: all elements are right; resharded: {', '.join(report.resharded) or 'nothing'}")

        # An empty dict asks for everything below its key. The tensors are created in host memory.
        state = {"model": {}}
        xc.load(state, path)
        assert all(torch.equal(state["model"][name], value) for name, value in values.items())
    print("OK: four meshes and host memory hold the saved values")


if __name__ == "__main__":
    main()

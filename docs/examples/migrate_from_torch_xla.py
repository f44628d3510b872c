"""Load a checkpoint that torch_xla's planners wrote, find what they left out, and save it again.

    python docs/examples/migrate_from_torch_xla.py

Runs on eight virtual CPU devices unless the environment names others.
"""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")

import tempfile

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint
import torch_xla.runtime as xr

import torch_xla_ckpt as xc


def model_state(values):
    """Return a state on the devices: one tensor tiled, one with two replicas of each tile."""
    mesh = xs.Mesh(np.arange(8), (4, 2), ("x", "y"))
    state = {name: value.to("xla") for name, value in values.items()}
    xs.mark_sharding(state["tiled"], mesh, ("x", "y"))
    xs.mark_sharding(state["partly_replicated"], mesh, ("x", None))
    torch_xla.sync()
    return {"model": state}


def main():
    xr.use_spmd()
    values = {"tiled": torch.rand(16, 8), "partly_replicated": torch.rand(16, 8)}
    with tempfile.TemporaryDirectory() as folder:
        old, new = os.path.join(folder, "old"), os.path.join(folder, "new")
        live = model_state(values)
        dcp.save(live, checkpoint_id=old, planner=torch_xla_checkpoint.SPMDSavePlanner(), no_dist=True)

        # torch_xla's planner leaves partially replicated tensors out, and its save succeeds. The load names them.
        target = model_state({name: torch.zeros(16, 8) for name in values})
        try:
            xc.load(target, old)
        except xc.MismatchError as error:
            missing = [mismatch.key for mismatch in error.mismatches if mismatch.kind == "missing"]
            print(f"The old checkpoint lacks: {', '.join(missing)}")
        assert missing == ["model.partly_replicated"]

        # If the program still runs, it has the values: save them with this package.
        xc.save(live, new)
        xc.load(target, new)
        for name, value in values.items():
            assert torch.equal(target["model"][name].cpu(), value)

        # If not, load what is there. The report names what keeps its initial value.
        target = model_state({name: torch.zeros(16, 8) for name in values})
        report = xc.load(target, old, missing="keep")
        assert report.missing == ("model.partly_replicated",)
        assert torch.equal(target["model"]["tiled"].cpu(), values["tiled"])
    print("OK: the old checkpoint opens, what it lacks is named, and the new checkpoint is complete")


if __name__ == "__main__":
    main()

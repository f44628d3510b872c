"""Checkpoints of every kind that a path can name, with the same small state in each of them."""

import json

import torch
import torch.distributed.checkpoint as dcp
import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint
from safetensors.torch import save_file

import torch_xla_ckpt as xc
from support.meshes import mesh, put, settle
from torch_xla_ckpt.state import flatten

LAYERS = 3
KEYS = [f"model.layers.{n}.{name}" for n in range(LAYERS) for name in ("weight", "bias")]


def host_state(scale=1.0):
    """Three alike layers, a scalar, an integer tensor, and objects, in host memory."""
    layers = {}
    for n in range(LAYERS):
        weight = torch.arange(16 * 8, dtype=torch.float32).reshape(16, 8) * scale + n
        layers[str(n)] = {"weight": weight, "bias": torch.full((8,), n * scale)}
    state = {"model": {"layers": layers, "scale": torch.tensor(scale)}, "steps": torch.arange(10), "epoch": 3}
    return {**state, "config": {"name": "small", "sizes": [1, 2]}}


def sharded_state(shape=(4, 2), spec=("a", "b"), scale=1.0):
    """The same state, its weights sharded over a mesh."""
    state = host_state(scale)
    on = mesh(shape)
    for layer in state["model"]["layers"].values():
        layer["weight"] = put(layer["weight"], on, spec)
        layer["bias"] = put(layer["bias"], on, (None,))
    settle()
    return state


def save_ours(path, state=None, **how):
    xc.save(sharded_state() if state is None else state, path, **how)


def save_stock(path):
    dcp.save(host_state(), checkpoint_id=path, no_dist=True)


def save_torch_xla(path):
    """What torch_xla's planner writes through stock storage."""
    state = host_state()
    on = mesh((8,))
    for layer in state["model"]["layers"].values():
        layer["weight"] = put(layer["weight"], on, ("a", None))
        layer["bias"] = put(layer["bias"], on, ("a",))
    settle()
    planner = torch_xla_checkpoint.SPMDSavePlanner()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), planner=planner, no_dist=True)


def save_lightning(path):
    """The files of Lightning's sharded checkpoints: DCP's, and ``meta.pt`` with everything else."""
    state = host_state()
    dcp.save({"state_dict": state["model"]}, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 3}, path / "meta.pt")


def save_safetensors(path):
    """A folder of safetensors files with an index, as the Hub has it."""
    path.mkdir()
    tensors = {key: leaf.value for key, leaf in flatten(host_state()).items() if leaf.is_tensor}
    weight_map = {key: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, key in enumerate(tensors)}
    for name in set(weight_map.values()):
        save_file({key: tensors[key].contiguous() for key in tensors if weight_map[key] == name}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save_safetensors_file(path):
    """One safetensors file."""
    save_file({key: leaf.value for key, leaf in flatten(host_state()).items() if leaf.is_tensor}, path)


def save_torch(path):
    """One file of ``torch.save``."""
    torch.save(host_state(), path)


def save_lightning_file(path):
    """The dict in a ``.ckpt`` file of Lightning. test_lightning.py has files that a Trainer wrote."""
    state = flatten(host_state()["model"])
    rest = {"epoch": 3, "global_step": 30, "pytorch-lightning_version": "2.6.0", "callbacks": {}, "loops": {"fit": {}}}
    torch.save({**rest, "state_dict": {key: leaf.value for key, leaf in state.items()}}, path)


CHECKPOINTS = {
    "ours": save_ours,
    "stock": save_stock,
    "torch_xla": save_torch_xla,
    "lightning": save_lightning,
    "lightning-file": save_lightning_file,
    "safetensors": save_safetensors,
    "safetensors-file": save_safetensors_file,
    "torch": save_torch,
}


def keys_of(kind):
    """Return the keys of the layers in a checkpoint of a kind."""
    return [key.replace("model.", "state_dict.") for key in KEYS] if kind.startswith("lightning") else KEYS


def save_run(path, steps=(10, 20, 30)):
    """A run of a CheckpointManager: step 20 has the lowest loss and the highest accuracy."""
    with xc.CheckpointManager(path, 1) as manager:
        for step in steps:
            metrics = {"loss": abs(step - 20) + 0.5, "accuracy": 1 - abs(step - 20) / 100}
            manager.save(step, host_state(float(step)), force=True, metrics=metrics)

"""What the tests of exchange/ export, and what they find in the files."""

import os

import torch
from safetensors.torch import load_file

from support.meshes import mesh, put, random_bits, same_bits

MESH = (4, 2)
HOST = {
    "layers.0.weight": random_bits((300, 200), torch.float32, 1),
    "layers.0.bias": random_bits((300,), torch.bfloat16, 2),
    "layers.1.weight": random_bits((513, 7), torch.float16, 3),
    "columns": random_bits((64, 4096), torch.int32, 4),
    "cube": random_bits((6, 5, 11), torch.float32, 5),
    "mask": random_bits((5, 3), torch.bool, 6),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 5),
}
SPECS = {
    "layers.0.weight": ("b", "a"),
    "layers.0.bias": ("a",),
    "layers.1.weight": ("a", "b"),
    "columns": (None, "a"),
    "cube": (None, "b", "a"),
}


def live(shape=MESH):
    """The tensors on a mesh."""
    return {key: put(value, mesh(shape), SPECS.get(key)) for key, value in HOST.items()}


def state():
    """A whole training state."""
    return {"model": live(), "step": 100, "optim": {"state": {0: {"m": torch.ones(3)}}, "param_groups": []}}


def written(path):
    """All tensors in the safetensors files of a folder, as the safetensors library reads them."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {key: value for file in files for key, value in load_file(file).items()}


def assert_same(found, expected=HOST):
    assert found.keys() == expected.keys()
    different = [key for key, value in expected.items() if not same_bits(found[key], value)]
    assert not different


def assert_nothing_left(folder):
    assert [name for name in os.listdir(folder) if "export" in name] == []

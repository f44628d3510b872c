"""A program that saves XLA tensors twice and is killed during the second save: killed_device_save.py FOLDER BLOW."""

import json
import sys
from pathlib import Path

import torch_xla_ckpt as xc
from support.crash_points import NEW, OLD, part
from support.fault_injection import Blow, Trap
from support.meshes import mesh, put
from torch_xla_ckpt.storage import files

SPECS = {"large": (("a", "b"), None), "own0": ("a", "b"), "small": ("b", None)}


def on_devices(state, shape):
    on = mesh(shape)
    model = {key: put(host, on, SPECS.get(key)) for key, host in state["model"].items()}
    return {**state, "model": model}


def main(folder, blow):
    folder = Path(folder)
    xc.save(on_devices(part(OLD), (4, 2)), folder / "checkpoint")
    files.os = Trap(folder / "notes", Blow(**json.loads(blow)))
    xc.save(on_devices(part(NEW), (4, 2)), folder / "checkpoint")


if __name__ == "__main__":
    main(*sys.argv[1:])

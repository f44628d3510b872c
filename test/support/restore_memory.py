"""A program of its own: restores a large model and its optimizer, and prints how far memory rose, in MiB.

``restore_memory.py save|restore FOLDER``. Prints the state's size, the peak above the start, and what remains.
"""

import json
import sys

import torch
import torch_xla.core.xla_model as xm

import torch_xla_ckpt as xc
from support.memory import watched
from support.meshes import mesh, put, settle

LAYERS, WIDTH = 6, 2048  # 16 MiB each, and twice that for the moments
BUDGET = 16 << 20


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def save(folder):
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    xc.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, folder)


def restore(folder):
    with torch.device("meta"):
        model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    put(torch.zeros(8), mesh((8,)), ("a",))  # the runtime's own memory
    settle()
    rule, on, reader = {"*": ("a", "b")}, mesh((4, 2)), xc.ShardReader(folder, memory_budget=BUDGET)
    with watched() as memory:
        xc.restore(model=model, optimizer=optimizer, sharding=rule, mesh=on, storage_reader=reader)
        xm.wait_device_ops()
    state = 3 * LAYERS * WIDTH * WIDTH * 4 / 2**20
    print(json.dumps({"state": state, "peak": memory.peak, "remains": memory.remains}))


if __name__ == "__main__":
    {"save": save, "restore": restore}[sys.argv[1]](sys.argv[2])

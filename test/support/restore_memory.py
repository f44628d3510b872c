"""A program of its own: restores a large model and its optimizer, and prints how far memory rose, in MiB.

``restore_memory.py save|restore FOLDER``. Prints the state's size, the peak above the start, and what remains.
"""

import json
import sys
import threading
from pathlib import Path

import torch
import torch_xla.core.xla_model as xm

import torch_xla_ckpt as xc
from support.meshes import mesh, put, settle

LAYERS, WIDTH = 6, 2048  # 16 MiB each, and twice that for the moments
BUDGET = 16 << 20


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def anonymous():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


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
    start, peak, done = anonymous(), 0, threading.Event()

    def sample():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())

    sampler = threading.Thread(target=sample)
    sampler.start()
    reader = xc.ShardReader(folder, memory_budget=BUDGET)
    xc.restore(model=model, optimizer=optimizer, sharding={"*": ("a", "b")}, mesh=mesh((4, 2)), storage_reader=reader)
    xm.wait_device_ops()
    done.set()
    sampler.join()
    state = 3 * LAYERS * WIDTH * WIDTH * 4 / 2**20
    print(json.dumps({"state": state, "peak": peak - start, "remains": anonymous() - start}))


if __name__ == "__main__":
    {"save": save, "restore": restore}[sys.argv[1]](sys.argv[2])

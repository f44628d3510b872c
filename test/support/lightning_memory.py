"""A program of its own: prints how far memory rises in MiB while SPMDStrategy makes and loads a large module.

``lightning_memory.py FOLDER``. The devices are virtual, so that their memory lies in the same process.
"""

import gc
import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import torch
import torch_xla.core.xla_model as xm

from support.lightning_modules import Net, loader, trainer
from torch_xla_ckpt.integrations.lightning import SPMDStrategy, consolidate

LAYERS, WIDTH = 16, 2048  # 16 MiB each
STATE = LAYERS * WIDTH * WIDTH * 4 / 2**20
BUDGET = 24 << 20


class Deep(Net):
    """Layers that ``configure_model`` builds one at a time."""

    device_of_layers = "cpu"

    def build(self):
        self.layers = None

    def configure_model(self):
        if self.layers is None:
            self.last = torch.nn.Linear(16, 8)
            self.layers = torch.nn.ModuleList()
            with torch.device(self.device_of_layers):
                for _ in range(LAYERS):
                    self.layers.append(torch.nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x):
        return self.last(x)


class DeepOnMeta(Deep):
    device_of_layers = "meta"


def anonymous():
    """Memory of this process in MiB, without maps of files."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


@contextmanager
def measured(name, found):
    gc.collect()
    xm.wait_device_ops()
    start, peak, done = anonymous(), 0, threading.Event()

    def sample():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
        xm.wait_device_ops()
    finally:
        done.set()
        sampler.join()
    found[name] = peak - start


def main(folder):
    found = {}
    one = trainer(folder)
    one.validate(Net(), loader(), verbose=False)  # what starting costs

    def validate(model, **options):
        trainer(folder, strategy=SPMDStrategy(check=False)).validate(model, loader(), verbose=False, **options)

    with measured("layer by layer", found):
        one.validate(Deep(), loader(), verbose=False)
    one.save_checkpoint(f"{folder}/sharded.ckpt", weights_only=True)
    with measured("consolidated", found):
        consolidate(f"{folder}/sharded.ckpt", f"{folder}/full.ckpt", memory_budget=BUDGET)
    del one
    with measured("initialised", found):
        validate(DeepOnMeta())
    with measured("sharded", found):
        validate(DeepOnMeta(), ckpt_path=f"{folder}/sharded.ckpt")
    with measured("full", found):
        validate(DeepOnMeta(), ckpt_path=f"{folder}/full.ckpt")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])

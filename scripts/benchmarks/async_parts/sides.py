"""The two sides of ``scripts/benchmarks/async_saves``, and the training loop that they save."""

from __future__ import annotations

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import math
import shutil
import warnings
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.debug import metrics
from torch_xla.experimental.distributed_checkpoint import CheckpointManager

import torch_xla_ckpt as xc

# torch and torch_xla log these warnings whenever their planners run.
warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(_xla)?\.")
warnings.filterwarnings("ignore", "TypedStorage is deprecated")

MIB = 1 << 20
MODES = ("defaults", "device", "host")
WIDTH = 2048  # a weight is 16 MiB
BATCH = 8

xr.use_spmd()


class Training:
    """Square layers under AdamW on a mesh of (4, 2). All are tiled, because torch_xla's manager loses partial replicas.

    Args:
        nbytes: size of the state in bytes: the weights and their two moments.
    """

    def __init__(self, nbytes: int):
        torch.manual_seed(0)
        self.mesh = xs.Mesh(np.arange(8), (4, 2), ("x", "y"))
        width = min(WIDTH, 1 << int(math.log2(math.sqrt(nbytes / 12 / 4))))
        layers = max(1, round(nbytes / (3 * 4 * width * width)))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.model.to("xla")
        for layer in self.model:
            xs.mark_sharding(layer.weight, self.mesh, ("x", "y"))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.rand(BATCH, width).to("xla")
        xs.mark_sharding(self.inputs, self.mesh, ("x", None))

    def step(self) -> None:
        self.model(self.inputs).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        torch_xla.sync()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optim.state_dict()}

    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors on devices, by key."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        found = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for number, p in enumerate(self.model.parameters()):
            assert id(p) in names
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"optim.state.{number}.{moment}"] = self.optim.state[p][moment]
        return found


def side_of(name: str, folder: Path) -> TorchXla | Ours:
    """Return the side with a name: "torch_xla", or one of ``MODES``."""
    return TorchXla(folder) if name == TorchXla.name else Ours(folder, name)


def settle() -> None:
    """Wait until the devices are idle."""
    torch_xla.sync()
    xm.wait_device_ops()


def compiled() -> int:
    """Return the number of graphs compiled so far."""
    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0


class Side(Protocol):
    name: str

    def save(self, step: int, state: dict[str, Any]) -> object:
        """Start a save. This call blocks the training loop."""

    def finish(self) -> None:
        """Wait until everything is written, and remove the files."""


class TorchXla:
    """torch_xla's ``CheckpointManager`` with the options that users choose."""

    name = "torch_xla"

    def __init__(self, folder: Path):
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
        self._folder = folder / self.name
        self._manager = CheckpointManager(str(self._folder), 1, max_to_keep=1, chkpt_on_preemption=False)

    def save(self, step: int, state: dict[str, Any]) -> object:
        return self._manager.save_async(step, state)

    def finish(self) -> None:
        self._manager.join()
        clear(self._folder)

    def close(self) -> None:
        self.finish()


class Ours:
    """``xc.async_save``, one save at a time like torch_xla's manager. Each save replaces the previous one.

    Args:
        folder: the folder to write in.
        mode: the stager's mode; "defaults" means ``SPMDStager()`` without options.
    """

    def __init__(self, folder: Path, mode: str):
        self.name = f"ours, {mode}"
        self._folder = folder / mode
        modes: dict[str, xc.staging.capture.Mode] = {"device": "device", "host": "host"}
        self.stager = xc.SPMDStager() if mode == "defaults" else xc.SPMDStager(modes[mode])
        self.last: xc.AsyncSave | None = None

    def save(self, step: int, state: dict[str, Any]) -> object:
        self.last = xc.async_save(state, self._folder, stager=self.stager, sync=False)
        return self.last

    def finish(self) -> None:
        self.stager.wait()

    def check(self, training: Training) -> None:
        """Compare the last checkpoint with the tensors on the devices, which have not changed since.

        Raises:
            SystemExit: a tensor differs.
        """
        found = {key: torch.zeros_like(tensor, device="cpu") for key, tensor in training.tensors().items()}
        xc.load({"model": nested(found, "model."), "optim": {"state": moments(found)}}, self._folder)
        for key, tensor in training.tensors().items():
            (held,) = torch_xla._XLAC._get_local_shards([tensor])
            ((*places,),) = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])
            for (shard, _), (_, index) in zip(held, places):
                if not torch.equal(shard, found[key][tuple(index)]):
                    raise SystemExit(f"{key} was saved wrong")

    def close(self) -> None:
        self.stager.close()
        clear(self._folder)


def nested(found: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in found.items() if key.startswith(prefix)}


def moments(found: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in nested(found, "optim.state.").items():
        number, _, moment = key.partition(".")
        state.setdefault(int(number), {})[moment] = tensor
    return state


def clear(folder: Path) -> None:
    for path in folder.iterdir() if folder.exists() else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()

"""Exports and imports of safetensors, beside torch's writer, transformers, plain copies and our own checkpoints.

Every time is the median of several runs after a warm-up, and the sides take turns. Every result is compared bit for
bit. No side calls fsync. The exit status is 0 if all results are right.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import transformers
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import torch_xla_ckpt as xc
from benchmarks.sizes import UNITS, size_of
from benchmarks.storage_parts.memory import Peak
from benchmarks.storage_parts.turns import Contender, WarmMemory, in_turns, ratio

TENSORS = 300
BUDGET = 64 << 20  # of the measurement of memory, in bytes
SPECS = (("a", "b"), ("b", "a"), (("a", "b"), None), (None, ("a", "b")))

State = dict[str, torch.Tensor]


def tensors(nbytes: int) -> State:
    """Return 300 float32 matrices with ``nbytes`` together."""
    side = 8 * round(math.sqrt(nbytes / 4 / TENSORS) / 8)
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{n}.weight": torch.randn(side, side, generator=generator) for n in range(TENSORS)}


def mesh(shape: tuple[int, int]) -> xs.Mesh:
    return xs.Mesh(np.arange(8), shape, ("a", "b"))


def on_mesh(host: State, shape: tuple[int, int]) -> State:
    """Return tensors on the devices, cut by rows, by columns and by both."""
    on = mesh(shape)
    found = {key: value.to("xla") for key, value in host.items()}
    for number, value in enumerate(found.values()):
        xs.mark_sharding(value, on, SPECS[number % len(SPECS)])
    settle()
    return found


def settle() -> None:
    torch_xla.sync()
    xm.wait_device_ops()


def check_folder(folder: Path, host: State) -> None:
    """Compare all tensors of a folder with the originals."""
    found = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  it is no mapping
                require(torch.equal(file.get_tensor(key), host[key]), f"{key} in {folder}")
                found += 1
    require(found == len(host), f"{found} of {len(host)} tensors in {folder}")


def check_devices(state: State, host: State) -> None:
    settle()
    for key in list(host)[:: max(1, len(host) // 20)]:
        require(torch.equal(state[key].cpu(), host[key]), key)


def require(is_right: bool, what: str) -> None:
    if not is_right:
        raise SystemExit(f"WRONG: {what}")


def cleared(*paths: Path) -> Callable[[], None]:
    def clear() -> None:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)

    return clear


class Exports:
    """Exports from a checkpoint, and live ones."""

    def __init__(self, host: State, folder: Path):
        self.host = host
        self.live = on_mesh(host, (4, 2))
        self.checkpoint = folder / "checkpoint"
        self.ours, self.peer, self.copy = folder / "ours", folder / "peer", folder / "copy"
        self.saved, self.exported = folder / "saved", folder / "exported"
        xc.save({"model": self.live}, self.checkpoint)

    def peers(self) -> None:
        """What torch offers: load the checkpoint into memory, write shards, and consolidate them."""
        state = {key: torch.empty_like(value) for key, value in self.host.items()}
        nested: dict[str, Any] = {"model": state}
        dcp.load(nested, checkpoint_id=self.checkpoint, no_dist=True)
        writer = HuggingFaceStorageWriter(
            str(self.peer),
            save_distributed=True,
            enable_consolidation=True,
            thread_count_consolidation=os.cpu_count() or 1,
            fqn_to_index_mapping=dict.fromkeys(state, 1),
        )
        dcp.save(state, storage_writer=writer, no_dist=True)

    def copies(self) -> None:
        self.copy.mkdir()
        shutil.copyfile(self.ours / "model.safetensors", self.copy / "model.safetensors")

    def from_checkpoint(self) -> list[Contender]:
        return [
            Contender(
                "ours",
                lambda: xc.export(self.checkpoint, self.ours),
                cleared(self.ours),
                lambda: check_folder(self.ours, self.host),
            ),
            Contender("copy", self.copies, cleared(self.copy), lambda: check_folder(self.copy, self.host)),
            Contender("peer", self.peers, cleared(self.peer), lambda: check_folder(self.peer, self.host)),
        ]

    def from_devices(self) -> list[Contender]:
        state = {"model": self.live}
        return [
            Contender(
                "export",
                lambda: xc.export(state, self.exported),
                cleared(self.exported),
                lambda: check_folder(self.exported, self.host),
            ),
            Contender("save", lambda: xc.save(state, self.saved, sync=False), cleared(self.saved)),
        ]

    def memory(self) -> tuple[int, int]:
        """Return the peak of anonymous memory of an export, and the bytes of one tensor."""
        cleared(self.ours)()
        with Peak() as peak:
            xc.export(self.checkpoint, self.ours, memory_budget=BUDGET)
        check_folder(self.ours, self.host)
        return peak.anonymous, next(iter(self.host.values())).nbytes


class Imports:
    """Imports onto eight devices, beside our own checkpoint on another mesh."""

    def __init__(self, host: State, folder: Path):
        self.host = host
        self.target = on_mesh({key: torch.zeros_like(value) for key, value in host.items()}, (2, 4))
        self.model, self.checkpoint = folder / "ours", folder / "checkpoint"
        self.over_read = 0.0

    def spoil(self) -> None:
        for value in self.target.values():
            value.zero_()
        settle()

    def load_model(self) -> None:
        report = xc.load(self.target, self.model)
        settle()
        self.over_read = (report.bytes_read or 0) / (report.bytes_needed or 1)

    def load_checkpoint(self) -> None:
        xc.load({"model": self.target}, self.checkpoint)
        settle()

    def contenders(self) -> list[Contender]:
        def check() -> None:
            check_devices(self.target, self.host)

        return [
            Contender("safetensors", self.load_model, self.spoil, check),
            Contender("our checkpoint", self.load_checkpoint, self.spoil, check),
        ]


class Models:
    """A Llama, from the folder that transformers saved onto eight devices."""

    def __init__(self, nbytes: int, folder: Path):
        width = 64 * max(1, round(math.sqrt(nbytes / 4 / 33 / 12.25) / 64))
        self.config = transformers.LlamaConfig(
            vocab_size=1000,
            hidden_size=width,
            intermediate_size=64 * round(width * 2.75 / 64),
            num_hidden_layers=33,
            num_attention_heads=width // 64,
            tie_word_embeddings=False,
        )
        self.path = folder / "llama"
        transformers.AutoModelForCausalLM.from_config(self.config).save_pretrained(self.path)
        self.made: Any = None

    def specs(self, model: Any) -> dict[str, tuple[str, str]]:
        return {key: ("a", "b") for key, value in model.named_parameters() if value.ndim == 2}

    def ours(self) -> None:
        with torch.device("meta"):
            self.made = transformers.AutoModelForCausalLM.from_config(self.config)
        xc.restore(self.path, model=self.made, sharding=self.specs(self.made), mesh=mesh((2, 4)))
        settle()

    def theirs(self) -> None:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(self.path)
        self.made = model.to("xla")
        on = mesh((2, 4))
        for key, spec in self.specs(self.made).items():
            xs.mark_sharding(self.made.get_parameter(key), on, spec)
        settle()

    def drop(self) -> None:
        self.made = None

    def check(self) -> None:
        with safe_open(self.path / "model.safetensors", "pt") as file:
            state = self.made.state_dict()
            for key in list(state)[::30]:
                require(torch.equal(state[key].cpu(), file.get_tensor(key)), key)

    def contenders(self) -> list[Contender]:
        return [
            Contender("restore", self.ours, self.drop, self.check),
            Contender("from_pretrained, move and mark", self.theirs, self.drop, self.check),
        ]


def export_from_checkpoint(options: argparse.Namespace, folder: Path, warm: WarmMemory) -> None:
    exports = Exports(tensors(options.size), folder)
    times = in_turns(exports.from_checkpoint(), options.repeat, warm)
    show("export from a checkpoint", times)
    print(f"  {ratio(times, 'peer', 'ours'):.2f} times as fast as torch's writer (target: at least 3)")
    print(f"  {ratio(times, 'ours', 'copy'):.2f} times a plain copy (target: at most 1.5)")
    peak, largest = exports.memory()
    print(f"  peak memory {peak >> 20} MiB: {peak / (BUDGET + largest):.2f} of budget and one tensor (at most 1)")


def export_from_devices(options: argparse.Namespace, folder: Path, warm: WarmMemory) -> None:
    times = in_turns(Exports(tensors(options.size), folder).from_devices(), options.repeat, warm)
    show("export from eight devices", times)
    print(f"  {ratio(times, 'export', 'save'):.2f} times xc.save (target: at most 1.3)")


def import_tensors(options: argparse.Namespace, folder: Path, warm: WarmMemory) -> None:
    host = tensors(options.size)
    exports = Exports(host, folder)
    xc.export(exports.checkpoint, exports.ours)
    del exports
    imports = Imports(host, folder)
    times = in_turns(imports.contenders(), options.repeat, warm)
    show("import onto eight devices", times)
    print(f"  {ratio(times, 'our checkpoint', 'safetensors'):.2f} times as fast as our checkpoint (at least 1)")
    print(f"  {imports.over_read:.3f} bytes read for each byte needed (at most 1.05)")


def import_model(options: argparse.Namespace, folder: Path, warm: WarmMemory) -> None:
    models = Models(options.size, folder)
    times = in_turns(models.contenders(), options.repeat, warm)
    show("a Llama onto eight devices", times)
    print(f"  {ratio(times, 'from_pretrained, move and mark', 'restore'):.2f} times as fast (target: at least 2)")
    for contender in models.contenders():
        contender.prepare()
        with Peak() as peak_of:
            contender.run()
        print(f"  peak memory of {contender.name}: {peak_of.anonymous >> 20} MiB, devices included")


CASES = {
    "export": export_from_checkpoint,
    "live": export_from_devices,
    "import": import_tensors,
    "model": import_model,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--size", type=size_of, default=UNITS["GiB"], help="bytes of the model; default 1GiB")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each side; default 5")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    xr.use_spmd()
    os.fsync = lambda file: None  # type: ignore[assignment]  # disks differ more than programs
    warm = WarmMemory(2 * options.size)
    for name in options.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            CASES[name](options, Path(folder), warm)


def show(what: str, times: dict[str, list[float]]) -> None:
    medians = ", ".join(f"{name} {statistics.median(values):.3f} s" for name, values in times.items())
    print(f"{what}: {medians}", flush=True)


if __name__ == "__main__":
    main()

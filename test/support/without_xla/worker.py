"""Reads and writes checkpoints where there is no torch_xla, as one of two ranks over gloo.

    worker.py stock|ours RANK SAVED OUT

"stock" uses torch.distributed.checkpoint alone, and torch_xla_ckpt cannot be imported; "ours" uses torch_xla_ckpt.
Rank 0 first reads everything on its own, without a process group. SAVED/meshes holds a checkpoint of the state of
reference.py for each mesh, SAVED/trained one of a trained model. What is written goes to OUT, and so does a report.
"""

from __future__ import annotations

import datetime
import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reference
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Library:
    """One of the two ways to read and write."""

    load: Callable[[dict[str, Any], Path], None]
    save: Callable[[dict[str, Any], Path], Any]
    planner: Callable[[], dcp.LoadPlanner]


def stock() -> Library:
    return Library(
        load=lambda target, path: dcp.load(target, checkpoint_id=path),
        save=lambda state, path: dcp.save(state, checkpoint_id=path),
        planner=dcp.DefaultLoadPlanner,
    )


def ours() -> Library:
    xc = importlib.import_module("torch_xla_ckpt")
    return Library(xc.load, xc.save, xc.SPMDLoadPlanner)


def main(name: str, rank: int, saved: Path, out: Path) -> None:
    warnings.simplefilter("ignore")
    if name == "stock":
        reference.hide("torch_xla", "torch_xla_ckpt")
        library = stock()
    else:
        reference.hide("torch_xla")
        library = ours()
    checkpoints = sorted((saved / "meshes").iterdir())
    report = reference.Report()
    if rank == 0:
        read_alone(library, checkpoints, out, report)
        write_alone(library, out, report)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out}/rendezvous",
        rank=rank,
        world_size=reference.RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (reference.RANKS,))
    exchange_dtensors(library, checkpoints, mesh, out, report)
    exchange_fsdp2(library, saved, mesh, out, report)
    dist.barrier()
    dist.destroy_process_group()
    with report.check("torch_xla stayed out"):
        assert "torch_xla" not in sys.modules
    report.finish(out / f"report-{rank}.json")


def read_alone(library: Library, checkpoints: list[Path], out: Path, report: reference.Report) -> None:
    """Into plain CPU tensors: in one call, with the planner given, and by DCP's own converter to one file."""
    for path in checkpoints:
        with report.check(f"plain {path.name}") as found:
            target = reference.state(reference.zeros, reference.NO_OBJECTS)
            library.load(target, path)
            found += reference.differences(target, reference.EXPECTED)
        with report.check(f"planner {path.name}") as found:
            target = reference.state(reference.zeros, reference.NO_OBJECTS)
            dcp.load(target, storage_reader=dcp.FileSystemReader(path), planner=library.planner())
            found += reference.differences(target, reference.EXPECTED)
        with report.check(f"converted {path.name}") as found:
            dcp_to_torch_save(path, out / "converted.pt")
            converted = torch.load(out / "converted.pt", weights_only=False)
            found += reference.differences(converted, with_string_keys(reference.EXPECTED))


def with_string_keys(value: Any) -> Any:
    """DCP records every key of a mapping as a string."""
    if isinstance(value, dict):
        return {str(key): with_string_keys(entry) for key, entry in value.items()}
    return [with_string_keys(entry) for entry in value] if isinstance(value, list) else value


def write_alone(library: Library, out: Path, report: reference.Report) -> None:
    with report.check("write plain") as found:
        library.save(reference.state(reference.full, reference.OBJECTS), out / "plain")
        target = reference.state(reference.zeros, reference.NO_OBJECTS)
        dcp.load(target, checkpoint_id=out / "plain")
        found += reference.differences(target, reference.EXPECTED)


def exchange_dtensors(
    library: Library, checkpoints: list[Path], mesh: DeviceMesh, out: Path, report: reference.Report
) -> None:
    """Into DTensors cut along the first and the last dimension; then out of them."""
    for path in checkpoints:
        with report.check(f"dtensor {path.name}") as found:
            for dim in (0, 2):
                target = reference.state(reference.zeros_on(mesh, dim), reference.NO_OBJECTS)
                library.load(target, path)
                found += reference.differences(target, reference.EXPECTED)
    with report.check("write dtensor"):
        whole = reference.state(reference.zeros_on(mesh, 0), reference.OBJECTS)
        fill(whole, reference.EXPECTED)
        whole["pair"] = reference.EXPECTED["pair"]  # an object: stock DCP would pickle the DTensors in it, mesh and all
        library.save(whole, out / "dtensor")


def fill(target: Any, source: Any) -> None:
    """Copy tensors into the DTensors at the same places."""
    if isinstance(target, DTensor):
        target.to_local().copy_(reference.local_part(source, target))
    elif isinstance(target, dict | list | tuple):
        for place in target if isinstance(target, dict) else range(len(target)):
            fill(target[place], source[place])


def exchange_fsdp2(library: Library, saved: Path, mesh: DeviceMesh, out: Path, report: reference.Report) -> None:
    """A model and its optimizer: what SPMD trained into FSDP2, and what FSDP2 trained into a checkpoint."""
    torch.manual_seed(1)
    net = reference.Net()
    fully_shard(net.first, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with report.check("write fsdp2"):
        reference.train(net, optimizer, torch.randn(4, 6), sync=lambda: None)
        trained = snapshot(net, optimizer)
        library.save(trained, out / "fsdp2")
        gathered = whole(trained)
        if dist.get_rank() == 0:
            torch.save(gathered, out / "fsdp2.pt")
    with report.check("fsdp2") as found:
        expected = torch.load(saved / "trained.pt")
        target = snapshot(net, optimizer)
        assert reference.differences(target, expected), "what is to be loaded is there already"
        library.load(target, saved / "trained")
        found += reference.differences(target, expected)
        set_state_dict(net, optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"])
        found += reference.differences(snapshot(net, optimizer), expected)


def snapshot(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


def whole(value: Any) -> Any:
    """Every DTensor gathered."""
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [whole(entry) for entry in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))

"""What is saved from a mesh opens in stock PyTorch, and what stock PyTorch saved opens on a mesh, bit for bit.

The other sides are real: other processes, two ranks over gloo, this torch with torch_xla hidden, and a newer torch
in an environment that has neither torch_xla nor this package (``scripts/env newer``).
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint
from torch.utils import _pytree as pytree
from torch_xla.experimental.distributed_checkpoint._helpers import _sharded_cpu_state_dict as sharded_cpu_state_dict

import torch_xla_ckpt as xc
from support import interpreters, meshes
from support.paths import ROOT, TEST, newer_python
from support.without_xla import reference

WORKER = TEST / "support" / "without_xla" / "worker.py"

MESHES = {
    "4x2": ((4, 2), None),
    "2x4": ((2, 4), None),
    "8x1": ((8, 1), None),
    "2x2x2": ((2, 2, 2), None),
    "permuted": ((4, 2), [3, 1, 0, 2, 7, 5, 6, 4]),
}
TORCHES = ("this torch", "newer torch")

on_every_torch = pytest.mark.parametrize("version", TORCHES)
from_every_mesh = pytest.mark.parametrize("saved_from", MESHES)
# torch_xla's planner has the signature of an older torch.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The function definition for SavePlanner")]


def on_mesh(mesh: xs.Mesh, host: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Makes the items of the state on the devices; ``host`` makes their data."""

    def spec(cuts: tuple[reference.Cut, ...]) -> tuple[Any, ...]:
        known = [tuple(axis for axis in axes if axis < len(mesh.mesh_shape)) for axes in map(as_tuple, cuts)]
        return tuple((axes[0] if len(axes) == 1 else axes) if axes else None for axes in known)

    def make(key: str) -> torch.Tensor:
        cuts = reference.ITEMS[key].cuts
        return meshes.put(host(key), mesh, None if cuts is None else spec(cuts))

    return make


def as_tuple(cut: reference.Cut) -> tuple[int, ...]:
    return () if cut is None else cut if isinstance(cut, tuple) else (cut,)


def trained_on_mesh(seed: int) -> dict[str, Any]:
    """Model and optimizer after three steps on a mesh, when the compiler has given every tensor a sharding."""
    torch.manual_seed(seed)
    mesh = meshes.mesh((4, 2))
    net = reference.Net().to(torch_xla.device())
    xs.mark_sharding(net.first.weight, mesh, ("a", "b"))
    xs.mark_sharding(net.second.weight, mesh, ("b", None))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    reference.train(net, optimizer, torch.randn(4, 6).to(torch_xla.device()), sync=torch_xla.sync)
    return reference.named_state(net, optimizer)


def on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: on_host(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_host(entry) for entry in value)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def wrong_on_devices(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where devices do not hold ``expected``, every shard and replica compared."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return [line for key in expected for line in wrong_on_devices(found[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor) and found.device.type == "xla":
        return [] if meshes.holds(found, expected) else [f"{path}: some device holds something else"]
    if isinstance(expected, list | tuple) and type(found) is type(expected) and len(found) == len(expected):
        entries = enumerate(zip(found, expected))
        return [line for n, (f, e) in entries for line in wrong_on_devices(f, e, f"{path}.{n}")]
    return reference.differences(found, expected, path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint from every mesh, and one of a model trained on a mesh."""
    folder = tmp_path_factory.mktemp("saved")
    for name, (shape, order) in MESHES.items():
        state = reference.state(on_mesh(meshes.mesh(shape, order), reference.full), reference.OBJECTS)
        if name == "permuted":
            writer = dcp.FileSystemWriter(folder / "meshes" / name, thread_count=2)
            dcp.save(state, storage_writer=writer, planner=xc.SPMDSavePlanner())
        else:
            xc.save(state, folder / "meshes" / name)
    trained = trained_on_mesh(seed=0)
    assert "last_tile_dim_replicate" in meshes.spec_of(trained["model"]["second.bias"]), "nobody marked this tensor"
    xc.save(trained, folder / "trained")
    torch.save(on_host(trained), folder / "trained.pt")
    return folder


@dataclass(frozen=True)
class Work:
    """What the two ranks of a worker found and wrote."""

    out: Path
    checks: dict[str, list[str]]
    statuses: list[int]
    errors: str

    def found(self, check: str) -> list[str]:
        """What is wrong, or an empty list."""
        return self.checks.get(check, [f"the worker never came to this check:\n{self.errors}"])


@pytest.fixture(scope="module")
def work(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Work]:
    """Runs a worker with a library ("stock" or "ours") on a torch, once each."""

    @functools.cache
    def run(library: str, version: str) -> Work:
        out = tmp_path_factory.mktemp(f"{library}-{version}".replace(" ", "-"))
        statuses = run_ranks(version, library, saved, out)
        checks: dict[str, list[str]] = {}
        for report in sorted(out.glob("report-*.json")):
            for name, lines in json.loads(report.read_text()).items():
                checks.setdefault(name, []).extend(f"{report.stem}: {line}" for line in lines)
        errors = "\n".join(log.read_text() for log in sorted(out.glob("log-*")))
        return Work(out, checks, statuses, errors)

    return run


@functools.cache
def python(version: str) -> str:
    if version == "this torch":
        return sys.executable
    return newer_python()


def run_ranks(version: str, library: str, saved: Path, out: Path) -> list[int]:
    """Run the worker for all ranks at once, each with a log, and return the exit statuses."""
    env = {"PYTHONPATH": str(ROOT) if library == "ours" else ""}
    options = {"env": env, "modules": interpreters.STOCK, "python": python(version), "cwd": out}
    ranks = [interpreters.Program([WORKER, library, rank, saved, out], **options) for rank in range(reference.RANKS)]
    try:
        for rank, program in enumerate(ranks):
            (out / f"log-{rank}").write_text("".join(program.communicate(timeout=120)))
    except subprocess.TimeoutExpired:
        (out / "log-0").write_text("the ranks did not end in time and were killed\n")
    finally:
        for program in ranks:
            program.kill()
    return [program.wait(60) for program in ranks]


def test_newer_environment_has_neither_torch_xla_nor_this_package():
    code = """
import importlib.util, torch
assert tuple(map(int, torch.__version__.split(".")[:2])) > (2, 9), torch.__version__
assert not importlib.util.find_spec("torch_xla") and not importlib.util.find_spec("torch_xla_ckpt")
"""
    assert_runs(code, cwd="/", env={"PYTHONPATH": ""})


def assert_runs(code: str, cwd: Path | str, env: dict[str, str]) -> None:
    options = {"python": newer_python(), "modules": interpreters.STOCK, "env": env, "cwd": cwd}
    done = interpreters.run(["-c", code], **options)
    assert done.returncode == 0, done.stderr


def test_a_meta_device_model_is_restored_without_torch_xla(tmp_path):
    code = """
import torch, torch_xla_ckpt as xc
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
xc.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}, ".")
with torch.device("meta"):
    empty = torch.nn.Linear(3, 2)
unstepped = torch.optim.AdamW(empty.parameters())
state = {"step": None}
try:
    xc.restore(".", model=empty, sharding=print)
except ImportError as error:
    assert "torch_xla_ckpt[xla]" in str(error) and empty.weight.is_meta
else:
    raise SystemExit("sharded without torch_xla")
xc.restore(".", model=empty, optimizer=unstepped, state=state)
assert state == {"step": 3} and torch.equal(empty.weight, model.weight) and empty.weight.requires_grad
assert torch.equal(unstepped.state[empty.bias]["exp_avg"], optimizer.state[model.bias]["exp_avg"])
"""
    assert_runs(code, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})


@on_every_torch
@from_every_mesh
def test_stock_torch_reads_every_bit_into_plain_tensors(work, version, saved_from):
    assert work("stock", version).found(f"plain {saved_from}") == []
    assert work("stock", version).found(f"planner {saved_from}") == []


@on_every_torch
@from_every_mesh
def test_stock_torch_converts_every_bit_to_one_file(work, version, saved_from):
    assert work("stock", version).found(f"converted {saved_from}") == []


@on_every_torch
@from_every_mesh
def test_stock_torch_reads_every_bit_into_dtensors_over_gloo(work, version, saved_from):
    assert work("stock", version).found(f"dtensor {saved_from}") == []


@on_every_torch
def test_stock_fsdp2_goes_on_from_model_and_optimizer_trained_on_a_mesh(work, version):
    assert work("stock", version).found("fsdp2") == []


@on_every_torch
@from_every_mesh
def test_this_package_reads_every_bit_without_torch_xla(work, version, saved_from):
    assert work("ours", version).found(f"plain {saved_from}") == []
    assert work("ours", version).found(f"planner {saved_from}") == []


@on_every_torch
@from_every_mesh
def test_this_package_reads_every_bit_into_dtensors_without_torch_xla(work, version, saved_from):
    assert work("ours", version).found(f"dtensor {saved_from}") == []


@on_every_torch
def test_this_package_loads_fsdp2_without_torch_xla(work, version):
    assert work("ours", version).found("fsdp2") == []


@on_every_torch
def test_what_this_package_saves_without_torch_xla_opens_in_stock_torch(work, version):
    assert work("ours", version).found("write plain") == []


@on_every_torch
@pytest.mark.parametrize("library", ("stock", "ours"))
def test_workers_end_well_and_never_import_torch_xla(work, version, library):
    done = work(library, version)
    assert done.found("torch_xla stayed out") == []
    assert done.statuses == [0] * reference.RANKS, done.errors


def load_in_one_call(target: dict[str, Any], path: Path) -> None:
    xc.load(target, path)


def load_with_planner(target: dict[str, Any], path: Path) -> None:
    dcp.load(target, checkpoint_id=path, planner=xc.SPMDLoadPlanner())


def reading_of(load: Callable[..., None], version: str, library: str) -> Callable[[dict[str, Any], Path], None]:
    """``load``, with our reader where stock DCP of torch 2.9 cannot read what stock DCP of a newer torch wrote."""
    if load is load_with_planner and (version, library) == ("newer torch", "stock"):
        return load_with_planner_and_reader
    return load


def load_with_planner_and_reader(target: dict[str, Any], path: Path) -> None:
    dcp.load(target, storage_reader=xc.ShardReader(path), planner=xc.SPMDLoadPlanner())


with_call_and_planner = pytest.mark.parametrize("load", (load_in_one_call, load_with_planner))
onto_two_meshes = pytest.mark.parametrize("loaded_onto", ("4x2", "2x2x2"))


def wrong_after(load: Callable[[dict[str, Any], Path], None], target: Any, path: Path, expected: Any) -> list[str]:
    """Load, and say where the target's own tensors do not hold ``expected`` afterwards."""
    before = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, torch.Tensor)]
    load(target, path)
    after = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, torch.Tensor)]
    if len(after) != len(before) or any(a is not b for a, b in zip(after, before)):
        return ["the target does not hold the same tensors as before, in the same places"]
    return wrong_on_devices(target, expected)


@on_every_torch
@pytest.mark.parametrize("library", ("stock", "ours"))
@pytest.mark.parametrize("written", ("plain", "dtensor"))
@with_call_and_planner
@onto_two_meshes
def test_what_was_saved_without_torch_xla_loads_onto_a_mesh(work, version, library, written, load, loaded_onto):
    done = work(library, version)
    assert done.found(f"write {written}") == []
    target = reference.state(on_mesh(meshes.mesh(*MESHES[loaded_onto]), reference.zeros), reference.NO_OBJECTS)
    assert wrong_after(reading_of(load, version, library), target, done.out / written, reference.EXPECTED) == []


@on_every_torch
@pytest.mark.parametrize("library", ("stock", "ours"))
@with_call_and_planner
def test_training_on_a_mesh_goes_on_from_what_fsdp2_trained(work, version, library, load):
    done = work(library, version)
    assert done.found("write fsdp2") == []
    target, expected = trained_on_mesh(seed=2), torch.load(done.out / "fsdp2.pt")
    assert wrong_after(reading_of(load, version, library), target, done.out / "fsdp2", expected) == []


def whole_for_torch_xla(make: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Leaves tensors unmarked that ``make`` would replicate partially: torch_xla's planner drops those."""

    def whole(key: str) -> torch.Tensor:
        tensor = make(key)
        partly = "last_tile_dim_replicate" in meshes.spec_of(tensor)
        return reference.full(key).to(torch_xla.device()) if partly else tensor

    return whole


@with_call_and_planner
@onto_two_meshes
@pytest.mark.parametrize("staged", (False, True), ids=("save", "save_async"))
def test_what_torch_xla_saved_loads_onto_a_mesh(tmp_path, load, loaded_onto, staged):
    make = whole_for_torch_xla(on_mesh(meshes.mesh((4, 2)), reference.full))
    theirs = {**reference.state(make, {}), **reference.OBJECTS}
    empty = on_mesh(meshes.mesh(*MESHES[loaded_onto]), reference.zeros)
    target = {**reference.state(empty, {}), **reference.NO_OBJECTS}
    expected = {**reference.state(reference.full, {}), **reference.OBJECTS}
    if staged:  # as its CheckpointManager.save_async does; tensors in a tuple become objects that only it can read
        for state in (theirs, target, expected):
            del state["pair"]
        meshes.settle()
        theirs = sharded_cpu_state_dict(theirs)
    dcp.save(theirs, checkpoint_id=tmp_path, planner=torch_xla_checkpoint.SPMDSavePlanner())
    assert wrong_after(load, target, tmp_path, expected) == []


@with_call_and_planner
def test_dicts_without_tensors_that_torch_xla_saved_as_one_object_load(tmp_path, load):
    """An optimizer's param_groups, for one: torch_xla's planner gives them one key, DCP gives each entry its own."""

    def optimizer_state(lr: float, host: torch.Tensor) -> dict[str, Any]:
        groups = torch.optim.AdamW([torch.nn.Parameter(host)], lr=lr).state_dict()["param_groups"]
        return {"state": {0: {"exp_avg": host.to(torch_xla.device())}}, "param_groups": groups}

    data = reference.full("model.tiled")
    theirs = {"optim": optimizer_state(0.125, data), "trainer": {"loop": dict(reference.OBJECTS)}}
    dcp.save(theirs, checkpoint_id=tmp_path, planner=torch_xla_checkpoint.SPMDSavePlanner())

    target = {"optim": optimizer_state(0.5, torch.zeros_like(data)), "trainer": {"loop": dict(reference.NO_OBJECTS)}}
    assert wrong_after(load, target, tmp_path, on_host(theirs)) == []

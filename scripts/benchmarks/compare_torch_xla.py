"""Which states the planners of torch_xla 2.9 and of this package restore, lose or refuse, case by case.

    ./scripts/benchmarks/compare_torch_xla

Both sides call the same ``dcp.save`` and ``dcp.load`` on eight virtual devices; only the planners differ. Each verdict
is computed from the files, the loaded values, the errors and the log. The exit status is 1 if ours fails a case, and
0 otherwise.
"""

from __future__ import annotations

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import datetime
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as theirs
import torch_xla.runtime as xr
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import torch_xla_ckpt as ours

xr.use_spmd()
MESH = xs.Mesh(np.arange(8), (4, 2), ("x", "y"))

State = dict[str, Any]
Fate = Literal["what was saved", "as before", "a part of what was saved", "something else"]
Spec = tuple[str | None, ...] | None


@dataclass(frozen=True)
class Side:
    """One pair of planners."""

    name: str
    save_planner: Callable[[], dcp.SavePlanner]
    load_planner: Callable[[], dcp.LoadPlanner]

    def save(self, state: State, folder: str) -> None:
        writer = dcp.FileSystemWriter(folder, sync_files=False)
        dcp.save(state, storage_writer=writer, planner=self.save_planner(), no_dist=True)

    def load(self, target: State, reader: dcp.FileSystemReader) -> None:
        dcp.load(target, storage_reader=reader, planner=self.load_planner(), no_dist=True)


@dataclass(frozen=True)
class Case:
    """A state to save, and a target to load it into.

    Args:
        title: the name of the case in the table.
        saved, target: functions that make the two state dicts.
        want: the right outcome. "restored": the target then holds the saved values. "refused": an error names all
            ``keys``, and the target keeps its values. "told": the load succeeds, and a warning names all ``keys``.
        keys: the keys that the error or warning must name.
    """

    title: str
    saved: Callable[[], State]
    target: Callable[[], State]
    want: Literal["restored", "refused", "told"]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a case for one side.

    Args:
        dropped: tensors that the checkpoint lacks although the save succeeded.
        error: the error of the load; None if the load succeeded.
        messages: the log lines and warnings of the load.
        fates: for each key of the target, its value after the load in words.
    """

    dropped: tuple[str, ...]
    error: BaseException | None
    messages: str
    fates: dict[str, Fate]

    def meets(self, case: Case) -> bool:
        if self.dropped:
            return False
        if case.want == "restored":
            return self.error is None and set(self.fates.values()) == {"what was saved"}
        if case.want == "refused":
            return set(self.named(case)) == set(case.keys) and set(self.fates.values()) == {"as before"}
        return self.error is None and set(self.named(case)) == set(case.keys)

    def named(self, case: Case) -> tuple[str, ...]:
        """Return the keys that the error or a warning names."""
        said = self.messages if self.error is None else str(self.error)
        return tuple(key for key in case.keys if key in said)

    def in_words(self, case: Case) -> str:
        parts = [f"save leaves out {listed(self.dropped)} and succeeds"] if self.dropped else []
        if self.error is not None:
            said = f"names {', '.join(self.named(case))}" if self.named(case) else f"says: {first_line(self.error)}"
            parts.append(f"load raises {type(self.error).__name__}, which {said}")
        elif case.want == "told":
            parts.append(f"load warns, naming {', '.join(self.named(case))}" if self.named(case) else "load is silent")
        else:
            by_fate = {fate: tuple(k for k, v in self.fates.items() if v == fate) for fate in self.fates.values()}
            said = ", ".join(f"{listed(keys)} is {fate}" for fate, keys in by_fate.items())
            parts.append("load succeeds; " + (f"every value is {next(iter(by_fate))}" if len(by_fate) == 1 else said))
        return "; ".join(parts)


def listed(keys: tuple[str, ...]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")


def first_line(error: BaseException, width: int = 60) -> str:
    line = (str(error).splitlines() or [""])[0]
    return line if len(line) <= width else line[: width - 4] + " ..."


def leaves(state: State, prefix: str = "") -> State:
    """Return the values by their dotted keys."""
    flat: State = {}
    for name, value in state.items():
        key = f"{prefix}{name}"
        flat |= leaves(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


def on_host(state: State) -> State:
    return {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in leaves(state).items()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def fate_of(after: Any, before: Any, saved: Any) -> Fate:
    if same(after, saved):
        return "what was saved"
    if same(after, before):
        return "as before"
    if isinstance(saved, torch.Tensor) and same(after, saved[tuple(slice(n) for n in after.shape)]):
        return "a part of what was saved"
    return "something else"


def run(case: Case, side: Side) -> Outcome:
    """Save and load, and compare the files and the loaded values with the saved state."""
    with tempfile.TemporaryDirectory() as folder:
        state, target = case.saved(), case.target()
        torch_xla.sync()
        before, saved = on_host(target), on_host(state)
        side.save(state, folder)
        reader = dcp.FileSystemReader(folder)
        written = reader.read_metadata().state_dict_metadata
        error = None
        with heard() as messages:
            try:
                side.load(target, reader)
            except CheckpointException as failure:
                error = failure.failures[0][0]
        after = on_host(target)
    return Outcome(
        dropped=tuple(k for k, v in saved.items() if isinstance(v, torch.Tensor) and k not in written),
        error=error,
        messages=" ".join(messages),
        fates={key: fate_of(value, before[key], saved.get(key)) for key, value in after.items()},
    )


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect log lines and warnings."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    others, root.handlers = root.handlers, [handler]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield messages
        messages += [str(warning.message) for warning in caught]
    finally:
        root.handlers = others


def tensor(shape: tuple[int, ...], spec: Spec, fill: float | None = None, **options: Any) -> torch.Tensor:
    """Return a tensor on the (4, 2) mesh, filled with consecutive numbers or with ``fill``."""
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    host = numbers if fill is None else torch.full(shape, float(fill))
    on_device = host.to(**options).to(torch_xla.device())
    if spec is not None:
        xs.mark_sharding(on_device, MESH, spec)
    return on_device


def trained(seed: int) -> State:
    """Return model and optimizer state after three training steps. Only the two weights are marked."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    model = model.to(torch_xla.device())
    xs.mark_sharding(model[0].weight, MESH, ("x", "y"))
    xs.mark_sharding(model[2].weight, MESH, ("y", "x"))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(4, 8).to(torch_xla.device())
    for _ in range(3):
        optimizer.zero_grad()
        model(data).square().sum().backward()
        optimizer.step()
        torch_xla.sync()
    return {"model": dict(model.state_dict()), "optim": optimizer.state_dict()["state"]}


CASES = (
    Case(
        "Partially replicated tensor: mesh (4, 2), marked ('x', None)",
        saved=lambda: {"layer.weight": tensor((16, 8), ("x", None))},
        target=lambda: {"layer.weight": tensor((16, 8), ("x", None), fill=0)},
        want="restored",
    ),
    Case(
        "Model and optimizer after three training steps; only the weights were marked",
        saved=lambda: trained(seed=0),
        target=lambda: trained(seed=1),
        want="restored",
    ),
    Case(
        "Target larger than the saved tensor",
        saved=lambda: {"layer.weight": tensor((8, 8), ("x", "y"))},
        target=lambda: {"layer.weight": tensor((16, 8), ("x", "y"), fill=-1)},
        want="refused",
        keys=("layer.weight",),
    ),
    Case(
        "Target smaller than the saved tensor",
        saved=lambda: {"layer.weight": tensor((16, 8), ("x", "y"))},
        target=lambda: {"layer.weight": tensor((8, 8), ("x", "y"), fill=-1)},
        want="refused",
        keys=("layer.weight",),
    ),
    Case(
        "Two keys of the target were never saved",
        saved=lambda: {"layer.weight": tensor((16, 8), ("x", "y"))},
        target=lambda: {
            name: tensor((16, 8), ("x", "y"), fill=-1) for name in ("layer.weight", "new.gate", "new.scale")
        },
        want="refused",
        keys=("new.gate", "new.scale"),
    ),
    Case(
        "numpy scalar in the state dict",
        saved=lambda: {"layer.weight": tensor((16, 8), ("x", "y")), "loss": np.float64(0.25)},
        target=lambda: {"layer.weight": tensor((16, 8), ("x", "y"), fill=0), "loss": None},
        want="restored",
    ),
    Case(
        "datetime in the state dict",
        saved=lambda: {"layer.weight": tensor((16, 8), ("x", "y")), "when": datetime.datetime(2024, 2, 29)},
        target=lambda: {"layer.weight": tensor((16, 8), ("x", "y"), fill=0), "when": None},
        want="restored",
    ),
    Case(
        "Saved key that the target lacks",
        saved=lambda: {"model": {name: tensor((16, 8), ("x", "y")) for name in ("weight", "forgotten")}},
        target=lambda: {"model": {"weight": tensor((16, 8), ("x", "y"), fill=0)}},
        want="told",
        keys=("model.forgotten",),
    ),
    Case(
        "Target of another dtype: float32 into bfloat16",
        saved=lambda: {"layer.weight": tensor((16, 8), ("x", "y"))},
        target=lambda: {"layer.weight": tensor((16, 8), ("x", "y"), fill=0, dtype=torch.bfloat16)},
        want="told",
        keys=("layer.weight",),
    ),
)


@dataclass
class Moved:
    """Bytes that a load read from the checkpoint and fetched from devices, and whether it restored the values."""

    fetched: int = 0
    read: int = 0
    restored: bool = False


class CountingReader(dcp.FileSystemReader):
    """A reader that adds up the bytes that the planner asks for."""

    def __init__(self, folder: str, moved: Moved):
        super().__init__(folder)
        self.moved = moved

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        saved = self.read_metadata().state_dict_metadata
        for item in plan.items:
            described = saved[item.storage_index.fqn]
            if isinstance(described, TensorStorageMetadata):
                self.moved.read += math.prod(item.lengths) * described.properties.dtype.itemsize
        return super().read_data(plan, planner)


@contextmanager
def counted_fetches(moved: Moved) -> Iterator[None]:
    """Add up the bytes that are copied from devices to the host."""
    original = torch_xla._XLAC._get_local_shards

    def counting(tensors: list[torch.Tensor]) -> Any:
        fetched = original(tensors)
        moved.fetched += sum(shard.nbytes for shards in fetched for shard, _ in shards)
        return fetched

    torch_xla._XLAC._get_local_shards = counting
    try:
        yield
    finally:
        torch_xla._XLAC._get_local_shards = original


@dataclass(frozen=True)
class Cost:
    """A load whose bytes are counted. Stock DCP writes the checkpoint, so that both sides read the same files."""

    title: str
    spec: Spec
    shape: tuple[int, ...] = (1024, 1024)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * 4

    def measure(self, side: Side) -> Moved:
        moved = Moved()
        source = torch.arange(math.prod(self.shape), dtype=torch.float32).reshape(self.shape)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"w": source}, storage_writer=dcp.FileSystemWriter(folder, sync_files=False), no_dist=True)
            target = {"w": tensor(self.shape, self.spec, fill=0)}
            torch_xla.sync()
            with counted_fetches(moved):
                side.load(target, CountingReader(folder, moved))
        moved.restored = torch.equal(target["w"].cpu(), source)
        return moved

    def met_by(self, moved: Moved) -> bool:
        return moved.restored and moved.fetched == 0 and moved.read == self.nbytes


COSTS = (
    Cost("Loading 4 MiB into a tensor marked ('x', 'y')", ("x", "y")),
    Cost("Loading 4 MiB into a tensor marked ('x', None), two replicas", ("x", None)),
)
THEIRS = Side(f"torch_xla {torch_xla.__version__}", theirs.SPMDSavePlanner, theirs.SPMDLoadPlanner)
OURS = Side("torch_xla_ckpt", ours.SPMDSavePlanner, ours.SPMDLoadPlanner)


def case_cell(case: Case, outcome: Outcome) -> Text:
    verdict = ("holds: ", "green") if outcome.meets(case) else ("FAILS: ", "bold red")
    return Text.assemble(verdict, outcome.in_words(case))


def cost_cell(cost: Cost, moved: Moved) -> Text:
    verdict = ("as needed: ", "green") if cost.met_by(moved) else ("more than needed: ", "yellow")
    restored = "" if moved.restored else "not restored; "
    traffic = f"{moved.read / 2**20:g} MiB requested, {moved.fetched / 2**20:g} MiB fetched from devices"
    return Text.assemble(verdict, restored + traffic)


def main() -> int:
    table = Table("Case", THEIRS.name, OURS.name, show_lines=True)
    ours_hold = True
    for case in CASES:
        outcomes = [run(case, side) for side in (THEIRS, OURS)]
        table.add_row(case.title, *(case_cell(case, outcome) for outcome in outcomes))
        ours_hold &= outcomes[1].meets(case)
    for cost in COSTS:
        traffic = [cost.measure(side) for side in (THEIRS, OURS)]
        table.add_row(cost.title, *(cost_cell(cost, moved) for moved in traffic))
        ours_hold &= cost.met_by(traffic[1])
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print("Ours holds in every case." if ours_hold else "Ours fails a case.")
    return 0 if ours_hold else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())

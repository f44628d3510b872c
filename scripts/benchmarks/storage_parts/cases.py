"""The cases of ``scripts/benchmarks/storage``: the sides of each case, its targets, and the check of its results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import torch_xla_ckpt as xc
from benchmarks.storage_parts.sides import DCP, OURS, TORCH_XLA, Bare, Orbax, Side
from benchmarks.storage_parts.state import COLUMNS, MIB, ROWS, Data, Sharding, State, fetch, put, settle, spoil
from benchmarks.storage_parts.turns import Contender, Measured, WarmMemory, in_turns, processor_time, ratio, tidy

TILED = Sharding((4, 2))
_FLOOR = "ours on all processors without a gap"


@dataclass(frozen=True)
class Claim:
    """One measured ratio of a case, with its target.

    Args:
        measured: the ratio.
        what: the words printed after the ratio.
        least: the smallest ratio that reaches the target; None if there is no such limit.
        most: the largest ratio that reaches the target; None if there is no such limit.
    """

    measured: float
    what: str
    least: float | None = None
    most: float | None = None

    @property
    def reached(self) -> bool | None:
        """None when there is no target."""
        if self.least is not None:
            return self.measured >= self.least
        return None if self.most is None else self.measured <= self.most


@dataclass(frozen=True)
class Row:
    """A case's results.

    Args:
        case: the name of the case.
        claims: the ratios; the first compares ours with the peer.
        measured: all values of each contender, in ``unit``.
        peer: the contender that ours is compared with first.
        unit: "seconds" (default) or "bytes".
    """

    case: str
    claims: list[Claim]
    measured: Measured
    peer: str = TORCH_XLA.name
    unit: Literal["seconds", "bytes"] = "seconds"


@dataclass(frozen=True)
class Load:
    """A case of loading.

    Args:
        case: the name of the case.
        saved, target: the shardings of the checkpoint and of the state it is loaded into.
        times: the target for the speed of ours, as a multiple of torch_xla's planners; None if there is none.
        read: the target for bytes read for each byte needed; None if there is none.
        once: True if reading no byte of the files twice is a target.
    """

    case: str
    saved: Sharding
    target: Sharding
    times: float | None = None
    read: float | None = None
    once: bool = False


LOADS = {
    "same": Load("load, same mesh", TILED, TILED, times=4),
    "reshard": Load("load, (4, 2) onto (2, 4)", TILED, Sharding((2, 4)), times=3),
    "columns": Load("load, columns out of rows", ROWS, COLUMNS, times=3, read=1.05),
    "replicated": Load("load, partially replicated", TILED, Sharding((4, 2), ("x", None)), once=True),
}


CASES = ("save", *LOADS, "small", "memory")


class Bench:
    """Runs the cases.

    Args:
        data: the state that is saved.
        folder: an empty folder on the disk to measure.
        repeat: the number of runs that are counted.
        orbax: the Orbax side; None to leave it out.
    """

    def __init__(self, data: Data, folder: Path, repeat: int, orbax: Orbax | None):
        self._data = data
        self._folder = folder
        self._repeat = repeat
        self._orbax = orbax
        self._warm = WarmMemory(max(2 * data.nbytes, 1024 * MIB))

    def run(self, case: str, small_tensors: int) -> Iterator[Row]:
        """Run a case of ``CASES`` and yield its rows."""
        if case == "save":
            yield self.save()
        elif case == "small":
            yield from self.small(small_tensors)
        elif case == "memory":
            yield from self.memory()
        else:
            yield self.load(LOADS[case])
        for left in self._folder.iterdir():
            shutil.rmtree(left)
        if self._orbax:
            self._orbax.do("drop")
        tidy()

    def save(self) -> Row:
        state = self._data.on_devices(TILED)
        contenders = [self._saving(side, state) for side in (TORCH_XLA, OURS)]
        ours = contenders[-1]
        if self._orbax:
            contenders.append(self._orbax_saving(self._orbax))
        bare = Bare(self._data.tensors)
        contenders += [
            self._fresh("bare write", lambda folder: bare.write(folder, threads=2)),
            self._fresh("bare write, one thread", lambda folder: bare.write(folder, threads=1)),
            Contender("fetch", lambda: fetch(state)),
        ]
        seconds = in_turns(contenders, self._repeat, self._warm)
        seconds[_FLOOR] = processor_time(ours, self._repeat, self._warm)
        claims = [*compared(seconds, 2.5), Claim(ratio(seconds, "ours", "bare write"), "of a bare write", most=1.3)]
        return Row("save, tiled", claims, seconds)

    def load(self, case: Load) -> Row:
        self._save_with(TORCH_XLA, OURS, sharding=case.saved)
        target = self._data.on_devices(case.target)
        reports: list[xc.LoadReport] = []
        contenders = [
            self._loading(TORCH_XLA, target),
            self._loading(OURS, target, lambda report: reports.append(report)),
        ]
        ours = contenders[-1]
        if self._orbax and case.target.spec == TILED.spec:
            contenders.append(self._orbax_loading(self._orbax, case.target.mesh))
        same = case.target == case.saved
        if same:
            contenders += self._floors_of_loading(target)
        seconds = in_turns(contenders, self._repeat, self._warm)
        seconds[_FLOOR] = processor_time(ours, self._repeat, self._warm)
        claims = compared(seconds, case.times)
        if same:
            claims.append(Claim(ratio(seconds, "ours", "memcpy", "put"), "of a memcpy and the put", most=2))
        claims += self._bytes_read(reports[-1], case)
        return Row(case.case, claims, seconds)

    def small(self, tensors: int) -> Iterator[Row]:
        """Measure many small tensors in host memory, which shows the cost of one item."""
        numbers = torch.rand(tensors, 16)
        state = {f"t{n}": row.clone() for n, row in enumerate(numbers)}
        target = {key: torch.zeros(16) for key in state}

        def clear() -> None:
            for tensor in target.values():
                tensor.zero_()

        def check() -> None:
            if not torch.equal(torch.stack(list(target.values())), numbers):
                raise SystemExit("the small tensors are wrong")

        def saving(side: Side) -> Contender:
            reader = DCP if side is OURS else OURS  # never the side that saved

            def check_saved(folder: Path) -> None:
                clear()
                reader.load(target, folder)
                check()

            return self._fresh(side.name, lambda folder: side.save(state, folder), check_saved)

        def loading(side: Side) -> Contender:
            folder = self._folder / f"small {side.name}"
            side.save(state, folder)
            return Contender(side.name, lambda: side.load(target, folder), clear, check)

        sides = (DCP, OURS, TORCH_XLA)
        for verb, contender in (("save", saving), ("load", loading)):
            seconds = in_turns([contender(side) for side in sides], self._repeat, self._warm)
            claims = compared(seconds, 5, DCP.name) + compared(seconds, None)
            yield Row(f"{verb}, {tensors:,} small", claims, seconds, peer=DCP.name)

    def memory(self) -> Iterator[Row]:
        """Measure the memory taken beside the state, with a small budget. torch_xla's planners have no budget.

        glibc keeps freed memory, and how much depends on what else the program did. So memory in use is measured while
        glibc returns large blocks at once. The values with glibc's defaults are shown beside it.
        """
        budget = min(128 * MIB, self._data.nbytes // 8)
        names = (TORCH_XLA.name, OURS.name)
        results = {name: self._memory(name, budget, {"MALLOC_MMAP_THRESHOLD_": str(MIB)}) for name in names}
        defaults = {name: self._memory(name, budget, {}) for name in names}
        allowed = budget + self._data.largest
        for verb in ("save", "load"):
            measured = {name: [result[verb]["anonymous"]] for name, result in results.items()}
            beside = {f"{name}, with files": [result[verb]["resident"]] for name, result in results.items()}
            beside |= {f"{name}, glibc's defaults": [result[verb]["anonymous"]] for name, result in defaults.items()}
            claim = Claim(measured["ours"][0] / allowed, f"of a budget of {budget // MIB} MiB and one tensor", most=1)
            yield Row(f"{verb}, memory", [claim], {**measured, **beside}, unit="bytes")

    def _memory(self, side: str, budget: int, environment: Mapping[str, str]) -> dict[str, dict[str, int]]:
        folder = self._folder / f"memory {side}"
        sizes = ["--size", str(self._data.nbytes), "--budget", str(budget)]
        command = [sys.executable, "-m", "benchmarks.storage_parts.memory", side, str(folder), *sizes]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **environment})
        shutil.rmtree(folder)
        return json.loads(done.stdout)

    def _fresh(
        self, name: str, save: Callable[[Path], object], check: Callable[[Path], object] = lambda folder: None
    ) -> Contender:
        """Return a contender that saves into a folder, and removes the folder before the next turn."""
        folder = self._folder / f"saved by {name}"

        def check_and_remove() -> None:
            check(folder)
            shutil.rmtree(folder)

        return Contender(name, lambda: save(folder), check=check_and_remove)

    def _saving(self, side: Side, state: State) -> Contender:
        def save(folder: Path) -> None:
            side.save(state, folder)
            settle()

        return self._fresh(side.name, save, self._check_saved)

    def _check_saved(self, folder: Path) -> None:
        """Check a checkpoint by loading it with stock DCP into host memory."""
        state = {key: torch.full_like(tensor, -1) for key, tensor in self._data.tensors.items()}
        DCP.load(state, folder)
        self._data.check_host(state)

    def _save_with(self, *sides: Side, sharding: Sharding) -> None:
        state = self._data.on_devices(sharding)
        for side in sides:
            side.save(state, self._folder / side.name)

    def _loading(self, side: Side, target: State, heed: Callable[[Any], object] = lambda report: None) -> Contender:
        def load() -> None:
            heed(side.load(target, self._folder / side.name))
            settle()

        return Contender(side.name, load, lambda: spoil(target), lambda: self._data.check(target))

    def _floors_of_loading(self, target: State) -> list[Contender]:
        bare, pieces = Bare(self._data.tensors), self._data.pieces(target)
        folder = self._folder / "bare"
        bare.write(folder, threads=1)
        return [
            Contender("bare read", lambda: bare.read(folder), bare.spoil, bare.check),
            Contender("memcpy", bare.copy, bare.spoil, bare.check),
            Contender("put", lambda: put(target, pieces), lambda: spoil(target), lambda: self._data.check(target)),
        ]

    def _orbax_saving(self, orbax: Orbax) -> Contender:
        orbax.do("make", *TILED.mesh)

        def check(folder: Path) -> None:
            orbax.do("drop")
            orbax.do("load", folder, *TILED.mesh)
            orbax.do("check", *TILED.mesh)

        return self._fresh(orbax.name, lambda folder: orbax.do("save", folder), check)

    def _orbax_loading(self, orbax: Orbax, mesh: tuple[int, int]) -> Contender:
        folder = self._folder / orbax.name
        orbax.do("make", *TILED.mesh)
        orbax.do("save", folder)
        return Contender(
            orbax.name,
            lambda: orbax.do("load", folder, *mesh),
            lambda: orbax.do("drop"),
            lambda: orbax.do("check", *mesh),
        )

    def _bytes_read(self, report: xc.LoadReport, case: Load) -> Iterator[Claim]:
        """Yield the ratios of bytes read. Each distinct box is needed once, so together they are the tensors' size."""
        read, needed = report.bytes_read, report.bytes_needed
        if read is None or needed != self._data.nbytes:
            raise SystemExit(f"the load report says that {needed} bytes were needed, and not {self._data.nbytes}")
        yield Claim(read / needed, "bytes read for each needed", most=case.read)
        if case.once:
            stored = sum(file.stat().st_size for file in (self._folder / OURS.name).glob("*.distcp"))
            yield Claim(read / stored, "of the files' bytes read", most=1)


def compared(seconds: Measured, least: float | None, peer: str = TORCH_XLA.name) -> list[Claim]:
    """Return the speed of ours as a multiple of the peer's, and of Orbax's if Orbax took part."""
    claims = [Claim(ratio(seconds, peer, "ours"), f"times as fast as {peer}", least=least)]
    if Orbax.name in seconds:
        claims.append(Claim(ratio(seconds, Orbax.name, "ours"), f"times as fast as {Orbax.name}", least=2))
    return claims

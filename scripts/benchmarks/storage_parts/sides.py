"""The sides of ``scripts/benchmarks/storage``: ours, and those it is compared with."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch_xla.experimental.distributed_checkpoint as torch_xla_planners

import torch_xla_ckpt as xc

SCRIPTS = Path(__file__).parents[2]
PIECE = 4 << 20


class Side(Protocol):
    @property
    def name(self) -> str: ...

    def save(self, state: dict[str, Any], folder: Path) -> object: ...

    def load(self, state: dict[str, Any], folder: Path) -> object: ...


@dataclass(frozen=True)
class Ours:
    """This package, which writes and verifies checksums."""

    memory_budget: int = 1 << 30
    name: str = "ours"

    def save(self, state: dict[str, Any], folder: Path) -> object:
        writer = xc.ShardWriter(folder, sync=False, memory_budget=self.memory_budget)
        return xc.save(state, storage_writer=writer)

    def load(self, state: dict[str, Any], folder: Path) -> xc.LoadReport:
        return xc.load(state, storage_reader=xc.ShardReader(folder, memory_budget=self.memory_budget))


@dataclass(frozen=True)
class Stock:
    """DCP's storage with its defaults, except that it does not call fsync."""

    name: str
    save_planner: Callable[[], dcp.SavePlanner]
    load_planner: Callable[[], dcp.LoadPlanner]

    def save(self, state: dict[str, Any], folder: Path) -> object:
        writer = dcp.FileSystemWriter(folder, sync_files=False)
        return dcp.save(state, storage_writer=writer, planner=self.save_planner(), no_dist=True)

    def load(self, state: dict[str, Any], folder: Path) -> object:
        return dcp.load(state, storage_reader=dcp.FileSystemReader(folder), planner=self.load_planner(), no_dist=True)


TORCH_XLA = Stock("torch_xla", torch_xla_planners.SPMDSavePlanner, torch_xla_planners.SPMDLoadPlanner)
OURS = Ours()
DCP = Stock("DCP", dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner)


class Orbax:
    """Orbax in a process of its own, which carries out one command at a time."""

    name = "Orbax"

    def __init__(self, tensors: int, shape: Sequence[int]):
        python = subprocess.run(
            [SCRIPTS / "env", "orbax"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        command = [python, "-m", "benchmarks.storage_parts.orbax_arrays", str(tensors), *map(str, shape)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()

    def do(self, command: str, *arguments: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps([command, *arguments], default=os.fspath), file=self._process.stdin, flush=True)
        self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise SystemExit("The process that runs Orbax has failed; its error is above")
        return answer


class Bare:
    """The same bytes without a checkpoint format, from and to host memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._source = [tensor.numpy().reshape(-1).view(np.uint8) for tensor in tensors.values()]
        self._copy = [np.ones_like(array) for array in self._source]

    def write(self, folder: Path, threads: int) -> None:
        """Write new files, one file a thread."""
        folder.mkdir()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda n: write_file(folder / str(n), self._source[n::threads]), range(threads)))

    def read(self, folder: Path) -> None:
        """Read the file of one thread into warm memory."""
        file = os.open(folder / "0", os.O_RDONLY)
        for array in self._copy:
            for start in range(0, len(array), PIECE):
                os.readv(file, [array[start : start + PIECE].data])
        os.close(file)

    def copy(self) -> None:
        for source, copy in zip(self._source, self._copy):
            np.copyto(copy, source)

    def spoil(self) -> None:
        for copy in self._copy:
            copy.fill(1)

    def check(self) -> None:
        if any(not np.array_equal(*pair) for pair in zip(self._source, self._copy)):
            raise SystemExit("a bare copy went wrong")


def write_file(path: Path, arrays: Sequence[np.ndarray[Any, np.dtype[np.uint8]]]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for array in arrays:
        for start in range(0, len(array), PIECE):
            written = os.write(file, array[start : start + PIECE].data)
            assert written == len(array[start : start + PIECE])
    os.close(file)

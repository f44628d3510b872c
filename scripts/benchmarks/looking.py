"""The commands of ``xc`` on large checkpoints: seconds beyond ``import torch``, bytes read, and peak memory.

Each command runs in a process of its own, after one run that is not counted. The checkpoints are made first, in a
temporary folder: 100,000 keys, 1,000,000 chunks, and 1 GiB in 64 tensors, whole and in rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import torch_xla_ckpt as xc
from torch_xla_ckpt import _dcp, inspecting
from torch_xla_ckpt.layout import Box, Shard, TensorLayout
from torch_xla_ckpt.planner import CopyPlanner
from torch_xla_ckpt.protocols import TensorAccess

KEYS, CHUNKS = 100_000, 1_000_000
TENSORS, ROWS, COLUMNS = 64, 1024, 4096  # 1 GiB of float32


def make_keys(path: Path, count: int) -> None:
    xc.save({f"layers.{n // 100}.block{n % 100}.weight": torch.zeros(4) for n in range(count)}, path, sync=False)


class Cut(TensorAccess):
    """Tensors of zeros with a chunk for each element: a million devices would be needed to save them as usual."""

    def settle(self) -> None:
        pass

    def layout(self, tensor: torch.Tensor) -> TensorLayout:
        shards = tuple(Shard(Box((n,), (1,)), "cut", n) for n in range(len(tensor)))
        return TensorLayout(tuple(tensor.shape), tensor.dtype, shards, (1,), "", identical=True)

    def fetch(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> Mapping[Box, torch.Tensor]:
        return {layout.shards[part].box: torch.zeros(1)}

    def host_bytes(self, tensor: torch.Tensor, layout: TensorLayout, part: int = 0) -> int:
        return 4

    def memory(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def put(self, tensor: torch.Tensor, layout: TensorLayout, shards: Mapping[Box, torch.Tensor]) -> None:
        raise NotImplementedError


def make_chunks(path: Path, count: int) -> None:
    state = {f"t{n}": torch.empty(count // 10, device="meta") for n in range(10)}
    access = Cut()
    planner = CopyPlanner({key: (key,) for key in state}, lambda tensor: access)
    _dcp.save(state, xc.ShardWriter(path, sync=False), planner, None, True)


def make_gigabyte(path: Path) -> None:
    torch.manual_seed(0)
    xc.save({f"layers.{n}.weight": torch.randn(ROWS, COLUMNS) for n in range(TENSORS)}, path, sync=False)


# The kernel's peak of the new program alone. The usage that wait4() returns begins with the size of this process.
REPORT = """
import atexit, sys
def report(file):
    with open("/proc/self/status") as status, open(file, "w") as out:
        out.write(next(line.split()[1] for line in status if line.startswith("VmHWM:")))
atexit.register(report, sys.argv.pop(1))
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""The variables of each command. An installed package is compiled, and so is ours after the run that is not counted."""

IMPORT = "import torch"
RUN = "import runpy; runpy.run_module('torch_xla_ckpt', run_name='__main__', alter_sys=True)"


def measured(program: str, arguments: Sequence[str], repeat: int) -> tuple[float, int, str]:
    """Return the median seconds and the peak memory in MiB of a program, and what it printed."""
    times, peak, out = [], 0, ""
    with tempfile.NamedTemporaryFile() as file:
        for number in range(repeat + 1):
            begun = time.perf_counter()
            command = [sys.executable, "-c", REPORT + program, file.name, *arguments]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
            seconds, out = time.perf_counter() - begun, child.stdout
            if child.returncode not in (0, 1):
                raise SystemExit(f"xc {' '.join(arguments)} failed")
            if number:
                times.append(seconds)
                peak = max(peak, int(Path(file.name).read_text()) >> 10)
    return statistics.median(times), peak, out


FLOOR = """
import mmap, os, sys, time
from concurrent.futures import ThreadPoolExecutor
import xxhash

def pieces(path):
    for name in sorted(os.listdir(path)):
        if name.endswith(".distcp"):
            with open(f"{path}/{name}", "rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            yield from (data[start : start + (4 << 20)] for start in range(0, len(data), 4 << 20))

def buffers(path):
    for name in sorted(os.listdir(path)):
        if name.endswith(".distcp"):
            file = os.open(f"{path}/{name}", os.O_RDONLY)
            yield from ((file, start) for start in range(0, os.fstat(file).st_size, 4 << 20))

work, *paths = sys.argv[1:]
begun = time.perf_counter()
with ThreadPoolExecutor(os.cpu_count()) as pool:
    for path in paths:
        if work == "hash":
            list(pool.map(xxhash.xxh3_64_digest, pieces(path)))
        else:
            list(pool.map(lambda one: len(os.pread(one[0], 4 << 20, one[1])), buffers(path)))
print(time.perf_counter() - begun)
"""
"""A program that reads or hashes the data files of checkpoints on all cores, and prints the seconds."""


def floor(work: str, *paths: Path) -> float:
    """Return the seconds that reading ("read") or hashing ("hash") checkpoints takes without any other work."""
    command = [sys.executable, "-c", FLOOR, work, *map(str, paths)]
    return min(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", help="where the checkpoints are made and kept; default: a temporary folder")
    parser.add_argument("--make", action="store_true", help="only make the checkpoints in the folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(exist_ok=True)
        make(folder)
        if not args.make:
            run(folder, args.repeat)


def make(folder: Path) -> None:
    """Make the checkpoints that are not there yet."""
    keys, chunks, whole, copy, rows, one = paths_in(folder)
    if not keys.exists():
        make_keys(keys, KEYS)
    if not chunks.exists():
        make_chunks(chunks, CHUNKS)
    if not whole.exists():
        make_gigabyte(whole)
        make_gigabyte(copy)
        inspecting.convert(whole, rows, mesh="a=8", specs=["*=a"])
    if not one.exists():
        xc.save({"weight": torch.randn(TENSORS * ROWS, COLUMNS)}, one, sync=False)


def paths_in(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / name for name in ("keys", "chunks", "whole", "copy", "rows", "one"))


def run(folder: Path, repeat: int) -> None:
    """Run the commands, and print a table."""
    keys, chunks, whole, copy, rows, one = paths_in(folder)
    base, memory, _ = measured(IMPORT, [], repeat)
    hashed = f"{floor('hash', whole):.2f} s for XXH3 on all cores"
    both = f"{floor('read', whole, rows):.2f} s to read both, {floor('hash', whole, rows):.2f} s to hash them"
    table = Table(
        "command", "s beyond import torch", "peak MiB", "bytes read", "without xc", title="xc on large checkpoints"
    )
    table.add_row("import torch", f"{base:.2f} s in all", f"{memory:,}", "", "")
    for name, without, arguments in (
        (f"ls of {KEYS:,} keys", "", ["ls", str(keys)]),
        (f"ls of {chunks_of(chunks):,} chunks", "", ["ls", str(chunks)]),
        ("show of a slice of 1 GiB", "", ["show", str(one), "weight[5, :8]", "--json"]),
        ("show of 1 GiB: all statistics", "", ["show", str(one), "weight", "--json"]),
        ("diff of 1 GiB, equal chunks", "", ["diff", str(whole), str(copy), "--json"]),
        ("verify of 1 GiB", hashed, ["verify", str(whole)]),
        ("diff of 1 GiB, other chunks", both, ["diff", str(whole), str(rows), "--json"]),
    ):
        seconds, peak, out = measured(RUN, arguments, repeat)
        read = f"{json.loads(out)['bytes_read']:,}" if "--json" in arguments else ""
        table.add_row(name, f"{seconds - base:.2f}", f"{peak:,}", read, without)
    Console(width=120).print(table)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {repeat} runs each")


def chunks_of(path: Path) -> int:
    """Return the number of chunks of a checkpoint."""
    found = inspecting.inspect(path)
    assert isinstance(found, inspecting.Contents)
    return sum(one.chunks for one in found.keys)


if __name__ == "__main__":
    main()

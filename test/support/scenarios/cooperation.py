"""What the hosts of storage/test_cooperation.py do. Each function runs in every process of a group.

Every process has a simulated store of its own, with the same objects and its own count of requests.
"""

import contextlib
import datetime
import functools
import os
import re
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torch_xla_ckpt as xc
from support import hosts
from support.meshes import mesh, random_bits, same_bits, settle
from support.scenarios import save_load
from support.simulated_store import MIB, REFUSED, Store, asks

warnings.filterwarnings("ignore")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.complex64, torch.bool)


def tensors():
    """24 MiB of tensors of several sizes and dtypes, and many tiny ones."""
    large = {f"large{n}": random_bits((4, 1024, 341 + n), torch.float32, n) for n in range(4)}
    typed = {str(dtype): random_bits((5, 777), dtype) for dtype in DTYPES}
    tiny = {f"tiny{n}": random_bits((7,), torch.float64, n) for n in range(300)}
    return {**large, **typed, **tiny, "scalar": random_bits((), torch.float32), "empty": torch.zeros(0, 3)}


def full_state():
    return {"model": tensors(), "step": 7, "notes": {"text": "x" * 1000, "numbers": list(range(50))}}


def empty_state():
    model = {key: torch.zeros_like(tensor) for key, tensor in tensors().items()}
    return {"model": model, "step": 0, "notes": {"text": "", "numbers": [0]}}


def is_full(state):
    expected = tensors()
    same = all(same_bits(state["model"][key], expected[key]) for key in expected)
    return same and state["step"] == 7 and state["notes"] == full_state()["notes"]


def is_untouched(state):
    return not any(tensor.any() for tensor in state["model"].values()) and state["step"] == 0


def gathered(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextlib.contextmanager
def a_store(folder):
    """A store with the files of all folders below ``folder``."""
    with Store() as store:
        for file in sorted(Path(folder).glob("*/*")):
            store[f"{file.parent.name}/{file.name}"] = file.read_bytes()
        yield store


def sizes(folder, name):
    """Bytes of all files that a load of the whole checkpoint reads."""
    return sum(file.stat().st_size for file in Path(folder, name).iterdir() if not file.name.startswith("lock"))


def read_bytes(requests):
    return sum(request.nbytes for request in requests if request.operation == "get")


def load_counted(folder, state, name="checkpoint", **options):
    """Load from a store. Returns the report, and the bytes that all ranks together have read from their stores."""
    with a_store(folder) as store, store.recorded() as requests:
        report = xc.load(state, store.url(name), storage_options=store.options, **options)
    assert report.requests.received + 0 <= read_bytes(requests)
    return report, sum(gathered(read_bytes(requests)))


def whole_copies(rank, world, folder):
    """All ranks hold everything. Each byte is read once, tensors, objects and metadata; the ranks read equal parts."""
    unique = sizes(folder, "checkpoint")
    state = empty_state()
    report, read = load_counted(folder, state, cooperative=True)
    assert is_full(state)
    assert read <= 1.05 * unique, (read / unique, world)
    own = gathered(report.bytes_read)
    assert max(own) <= 2 * sum(own) / world, own
    assert report.bytes_read + report.bytes_received >= report.bytes_needed
    assert "from other ranks" in str(report)

    by_itself = empty_state()
    report, read = load_counted(folder, by_itself, cooperative=False)
    assert is_full(by_itself) and read >= 0.99 * world * unique and report.bytes_received == 0

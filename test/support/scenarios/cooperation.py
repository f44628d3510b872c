"""What the hosts of storage/test_cooperation.py do. Each function runs in every process of a group.

Every process has a simulated store of its own, with the same objects and its own count of requests.
"""

import concurrent.futures
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
            if file.is_file():
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


def targets_differ(rank, world, folder):
    """Every rank has other keys and other parts. What two ranks need is read once, and each gets what it asked for."""
    expected = tensors()
    wanted = [key for n, key in enumerate(expected) if "tiny" in key or n % world in (rank, 0)]
    own = {key: torch.zeros_like(expected[key]) for key in wanted}
    state = {"model": own}
    report, read = load_counted(folder, state, cooperative=True, missing="error", unexpected="ignore")
    assert all(same_bits(tensor, expected[key]) for key, tensor in state["model"].items())
    told = read / sizes(folder, "checkpoint"), gathered((report.bytes_read, report.requests))
    assert sum(gathered(report.bytes_received)) and read <= 1.05 * sizes(folder, "checkpoint"), told


def devices_of_several_hosts(rank, world, folder):
    """Each host has a part of a mesh, and several hosts hold the same boxes. Cut, replicated and odd tensors."""
    sys.modules["torch_xla_ckpt.api"].SPMDLoadPlanner = functools.partial(
        xc.SPMDLoadPlanner, access=hosts.share_access(rank, world)
    )
    for shape in ((4, 2), (1, 8), (2, 4)):
        target = save_load.state(mesh(shape, order=[7, 2, 5, 0, 3, 6, 1, 4]), fill=1.5)
        report, read = load_counted(folder, target, "meshes", cooperative=True)
        settle()
        for key, host in save_load.host_tensors().items():
            assert save_load.share_holds(target["model"][key], host, rank, world), (shape, key)
        assert same_bits(target["cpu"], random_bits((1000, 70), torch.float64)) and target["step"] == 5
        told = read / sizes(folder, "meshes"), gathered((report.bytes_read, report.requests))
        # The checkpoint is small: each rank also reads some KiB between its own tiny chunks, to save requests.
        assert read <= 1.05 * sizes(folder, "meshes") + 32_000 * (world - 1), (shape, told)
        assert sum(gathered(report.bytes_received)), shape


def policies(rank, world, folder):
    """Missing, created, renamed, tied and cast keys are treated as without reading together."""
    expected = tensors()
    for cooperative in (True, False):
        model = {
            "large0": torch.zeros_like(expected["large0"]),
            "copy": torch.zeros_like(expected["large0"]),  # tied: one saved tensor, two keys
            "large1": torch.zeros_like(expected["large1"], dtype=torch.float64),
            "new": torch.ones(3),
        }
        state = {"model": model, "notes": {}}
        report, read = load_counted(
            folder,
            state,
            cooperative=cooperative,
            rename={"model.large0": ["model.large0", "model.copy"]},
            missing="keep",
            unexpected="restore",
            exclude=["model.tiny*"],
        )
        assert same_bits(model["large0"], expected["large0"]) and same_bits(model["copy"], expected["large0"])
        assert same_bits(model["large1"], expected["large1"].to(torch.float64)) and model["new"].eq(1).all()
        assert same_bits(model["large2"], expected["large2"]) and state["notes"] == full_state()["notes"]
        assert report.cast and report.missing == ("model.new",) and "model.large3" in report.created
        assert not cooperative or read <= 1.05 * sizes(folder, "checkpoint")


def objects_and_files_of_others(rank, world, folder):
    """safetensors and torch.save files: one rank reads the headers and the objects, and all get them."""
    expected = tensors()
    for name in ("safetensors", "file.pt"):
        path = f"others/{name}" if name == "file.pt" else name
        keys = [key for key in expected if "complex" not in key]
        model = {key: torch.zeros_like(expected[key]) for key in keys}
        _, read = load_counted(folder, model, path, cooperative=True)
        assert all(same_bits(model[key], expected[key]) for key in keys)
        assert read <= 1.05 * sum(expected[key].nbytes for key in keys) + 200_000, (name, read)


@contextlib.contextmanager
def failure_on_all(rank, *texts):
    with pytest.raises(xc.CheckpointError) as caught:
        yield caught
    for text in texts:
        assert re.search(text, str(caught.value)), (rank, text, str(caught.value))


def one_reader_fails(rank, world, folder):
    """One rank's store refuses. All ranks raise an error with key, rank and cause; nothing has changed; all go on."""
    state = empty_state()
    with a_store(folder) as store:
        url, options = store.url("checkpoint"), store.options
        refused = store.failing(REFUSED, asks("get", "*.distcp")) if rank == 1 else contextlib.nullcontext()
        with refused, failure_on_all(rank, r"^rank 1: cannot read 'model\.|^rank 1: cannot read '", "403 Forbidden"):
            xc.load(state, url, storage_options=options, cooperative=True)
        assert state["step"] == 0 and state["notes"] == empty_state()["notes"]
        xc.load(state, url, storage_options=options, cooperative=True)
    assert is_full(state)


def damaged_bytes(rank, world, folder):
    """Damage in the store is named with its key and file on all ranks. Damage in what one rank gets is read again."""
    state = empty_state()
    with a_store(folder) as store:
        files = [name for name in store.names("checkpoint") if name.endswith(".distcp")]
        name = max(files, key=lambda name: len(store[f"checkpoint/{name}"]))
        whole = store[f"checkpoint/{name}"]
        middle = len(whole) // 2
        store[f"checkpoint/{name}"] = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        with pytest.raises(
            xc.CorruptCheckpointError, match=rf"^rank \d: .*'model.large\d': {name}.*checksum"
        ) as caught:
            xc.load(state, store.url("checkpoint"), storage_options=store.options, cooperative=True)
        assert [damage.file for damage in caught.value.damages] == [name]
        assert state["step"] == 0
        store[f"checkpoint/{name}"] = whole[: middle // 2]
        with pytest.raises(xc.CorruptCheckpointError, match=r"rank \d: .*the file ends before these bytes"):
            xc.load(state, store.url("checkpoint"), storage_options=store.options, cooperative=True)


def short_messages(rank, world, folder):
    """A message that arrives shorter than it was sent is noticed, and its bytes are read from the store."""
    from torch_xla_ckpt.cooperation import exchange

    send = exchange.Exchange.send
    sent = []

    def short(self, data, to, tag):
        if rank == 0 and len(data) > MIB:
            sent.append(data[: len(data) // 2])
            return send(self, sent[-1], to, tag)
        return send(self, data, to, tag)

    exchange.Exchange.send = short
    state = empty_state()
    with save_load.record_warnings() as said:
        _, read = load_counted(folder, state, cooperative=True)
    assert is_full(state) and gathered(len(sent))[0]
    assert rank == 0 or any("did not arrive as another rank sent them" in text for text in said)
    assert read > 1.05 * sizes(folder, "checkpoint")


def replaced_while_read(rank, world, folder):
    """Another save replaces the checkpoint while the ranks read it. All begin again, and get the new one."""
    state = empty_state()
    with a_store(folder) as store:

        def replace(request):
            if request.operation == "get" and request.name.endswith(".distcp") and "bucket/new/.metadata" in new:
                for path in [path for path in store.objects if path.startswith("bucket/checkpoint/")]:
                    store.drop(path)
                for path in list(new):
                    store.put(path.replace("/new/", "/checkpoint/"), new.pop(path).tobytes())
            return False

        new = {path: data for path, data in store.objects.items() if path.startswith("bucket/new/")}
        with store.failing(REFUSED, replace):
            report = xc.load(state, store.url("checkpoint"), storage_options=store.options, cooperative=True)
    assert report.restarts and state["step"] == 8 and state["model"]["large0"].eq(2).all()


def one_reader_is_killed(rank, world, folder):
    """A rank is killed while it reads. The others name it in an error soon, although the timeout is long."""
    state, start = empty_state(), time.monotonic()
    with a_store(folder) as store:

        def kill(request):
            if rank == 1 and request.operation == "get" and request.name.endswith(".distcp"):
                os.kill(os.getpid(), signal.SIGKILL)
            return False

        with store.failing(REFUSED, kill), failure_on_all(rank, "rank 1(, 3)? did not come"):
            xc.load(state, store.url("checkpoint"), storage_options=store.options, cooperative=True)
    assert time.monotonic() - start < 60 and state["step"] == 0
    os._exit(0)  # leaving a group with a dead rank would hang


def one_reader_is_stopped(rank, world, folder):
    """A rank stops while it reads, and its connections stay. The others end with an error after the group's timeout."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    process = gathered(os.getpid())[1]
    with a_store(folder) as store:

        def stop(request):
            if rank == 1 and request.operation == "get" and request.name.endswith(".distcp"):
                os.kill(os.getpid(), signal.SIGSTOP)
            return False

        options = {"storage_options": store.options, "cooperative": True, "process_group": group}
        with store.failing(REFUSED, stop), failure_on_all(rank, "rank 1"):
            xc.load(empty_state(), store.url("checkpoint"), **options)
    if rank == 0:
        os.kill(process, signal.SIGKILL)
    os._exit(0)


def wishes_differ(rank, world, folder):
    """Ranks that want different things get an error that names them, before anything is read."""
    with a_store(folder) as store:
        url, options = store.url("checkpoint"), store.options
        with failure_on_all(rank, "cooperative=True on rank 0, and cooperative=False on rank 1"):
            xc.load(empty_state(), url, storage_options=options, cooperative=rank == 0)
        state = empty_state()
        report = xc.load(state, url, storage_options=options, cooperative=True if rank == 0 else None)
        assert report.bytes_received and is_full(state)
        reader = torch.distributed.checkpoint.FileSystemReader(f"{folder}/checkpoint")
        with failure_on_all(rank, "cooperative=True needs a ShardReader, and rank 0"):
            xc.load(empty_state(), storage_reader=reader, cooperative=True)
        other = store.url("checkpoint" if rank == 0 else "new")
        with failure_on_all(rank, "rank 0 loads from .*checkpoint, and rank 1 from .*new"):
            xc.load(empty_state(), other, storage_options=options, cooperative=True)
        with failure_on_all(rank, "the processes have found different ones.*rank 1 from .*new"):
            xc.load(empty_state(), other, storage_options=options)
        report = xc.load(state, url, storage_options=options, cooperative=True, no_dist=True)
        assert not report.bytes_received and report.bytes_read


def by_itself(rank, world, folder):
    """Ranks read together by themselves where a store is read and enough is shared; never on local disks."""
    sys.modules["torch_xla_ckpt.cooperation.cooperation"].LEAST_BYTES = 8 * MIB
    with a_store(folder) as store:
        report = xc.load(empty_state(), store.url("checkpoint"), storage_options=store.options)
        assert report.bytes_received
        small = {"model": {f"tiny{n}": torch.zeros(7, dtype=torch.float64) for n in range(300)}}
        report = xc.load(small, store.url("checkpoint"), storage_options=store.options, unexpected="ignore")
        assert report.bytes_received == 0
    state = empty_state()
    assert xc.load(state, f"{folder}/checkpoint").bytes_received == 0 and is_full(state)
    state = empty_state()
    report = xc.load(state, f"{folder}/checkpoint", cooperative=True)
    assert is_full(state) and report.bytes_received
    assert sum(gathered(report.bytes_read)) <= 1.05 * sizes(folder, "checkpoint")


def small_budget(rank, world, folder):
    """Blocks that wait for others count in the memory budget, and no rank waits for ever."""
    from support.memory import watched

    state = empty_state()
    with a_store(folder) as store, store.recorded() as requests:
        url, options = store.url("checkpoint"), store.options
        xc.load(state, url, storage_options=options, cooperative=True)  # memory that is taken once
        state = empty_state()
        reader = xc.ShardReader(url, storage_options=options, memory_budget=2 * MIB)
        with watched() as memory:
            xc.load(state, storage_reader=reader, cooperative=True)
    assert is_full(state) and requests
    # The largest tensor, as it is received and as it is read, and what gloo and malloc hold.
    assert memory.peak <= 2 + 2 * 5.4 + 8, memory.peak


def models_and_managers(rank, world, folder):
    """``restore`` and a manager pass the option on: models, optimizers and objects are right, and read once."""
    torch.manual_seed(0)
    model = torch.nn.Linear(600, 700)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 600)).sum().backward()
    optimizer.step()
    with xc.CheckpointManager(f"{folder}/run{world}", chkpt_on_preemption=False, sync=False) as manager:
        manager.save(3, {"model": model.state_dict(), "optim": optimizer.state_dict(), "n": 3}, force=True)
        for restore in (
            lambda **options: xc.restore(f"{folder}/run{world}/3", cooperative=True, **options),
            lambda **options: (manager.restore(3, cooperative=True, **options), manager.report)[1],
        ):
            new = torch.nn.Linear(600, 700)
            fresh = torch.optim.Adam(new.parameters())
            report = restore(model=new, optimizer=fresh)
            assert all(same_bits(a.detach(), b.detach()) for a, b in zip(new.parameters(), model.parameters()))
            for a, b in zip(new.parameters(), model.parameters()):
                for key, value in optimizer.state[b].items():
                    assert same_bits(fresh.state[a][key], value), key
            assert report.bytes_received, report
            assert sum(gathered(report.bytes_read)) <= 1.05 * sum(
                file.stat().st_size for file in Path(folder, f"run{world}/3").glob("*.distcp")
            )


def loads_in_threads_do_not_cross(rank, world, folder):
    """Two threads of each rank load two checkpoints, each with its own group, and get their own values."""
    groups = [dist.new_group(list(range(world)), timeout=datetime.timedelta(seconds=30)) for _ in range(2)]
    paths = [Path(folder) / f"crossing{number}" for number in range(2)]
    for number, path in enumerate(paths):
        if rank == 0:
            xc.save({"w": torch.full((1000, 1000), number)}, path, no_dist=True)
    dist.barrier()

    def load(number):
        found = {"w": torch.zeros(1000, 1000, dtype=torch.int64)}
        xc.load(found, paths[number], cooperative=True, process_group=groups[number])
        return bool(found["w"].eq(number).all())

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for turn in range(4):  # the threads' order changes
            order = (0, 1) if (rank + turn) % 2 else (1, 0)
            assert all(threads.map(load, order))
    dist.barrier()

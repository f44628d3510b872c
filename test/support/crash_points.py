"""Saves that are struck at one of their file operations, and what must be true after it.

A ``Case`` is the same save again and again, struck at every operation in turn. Each attempt forks the processes that
save, so nothing here may start threads or devices that would not survive it: ``fork_server.py`` runs it.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import threading
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torch_xla_ckpt as xc
from support.fault_injection import REFUSALS, Audit, Blow, Trap, read_notes
from torch_xla_ckpt import coordination
from torch_xla_ckpt.storage import files

FORK = multiprocessing.get_context("fork")
HANGS = 20  # seconds after which a process counts as hanging; gloo itself would wait longer
GLOO = datetime.timedelta(seconds=5 * HANGS)
TOGETHER = 3  # attempts at a time
THREADS = 2  # that write, in each process

OLD, NEW, NEXT = "old", "new", "next"
_MASKS = {OLD: 0x00, NEW: 0xFF, NEXT: 0x55}  # no byte of a tensor is the same in two of them

LITTER = {
    "__0_0-0123456789abcdef.distcp",
    "__1_3-0123456789abcdef.distcp",
    "manifest-0123456789abcdef.json",
    ".metadata-0123456789abcdef.tmp",
}
"""What a save that broke off may have left."""


# What is saved, and what comes back


@functools.cache
def part(state, world=1, rank=0):
    """What one process passes to save: tensors that all have, and one of its own. Alone, it has two batches of them."""

    def tensor(key, dtype, *shape):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        generator = torch.Generator().manual_seed(sum(key.encode()))
        bits = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator) ^ _MASKS[state]
        return bits.view(dtype).view(shape)

    model = {
        "large": tensor("large", torch.float32, 1310 if world == 1 else 262, 1001),  # 5 MiB; two processes share 1 MiB
        f"own{rank}": tensor(f"own{rank}", torch.float64, 300, 50),
        "small": tensor("small", torch.int16, 7, 3),
        "scalar": tensor("scalar", torch.int64),
        "empty": torch.zeros(0, 2),
    }
    return {"model": model, "note": (state, 1.5, b"an object")}


@functools.cache
def whole(state, world=1):
    """What all processes together save."""
    model = {key: tensor for rank in range(world) for key, tensor in part(state, world, rank)["model"].items()}
    return {**part(state, world), "model": model}


def empty(world=1):
    """A target for it."""
    model = {key: torch.zeros_like(tensor) for key, tensor in whole(OLD, world)["model"].items()}
    return {"model": model, "note": None}


def loads(path, world=1):
    """Which state a folder holds, old, new, next or "nothing"; xc.load, stock dcp.load and verify must agree."""
    path = Path(path)
    ours, stock = empty(world), empty(world)
    try:
        xc.load(ours, path, no_dist=True)
    except xc.CheckpointError as error:
        assert "there is no checkpoint" in str(error), f"something half-written is there: {error}"
        with contextlib.suppress(CheckpointException):
            dcp.load(stock, checkpoint_id=path, no_dist=True)
            raise AssertionError("xc.load finds nothing, but stock dcp.load does") from error
        with contextlib.suppress(xc.CheckpointError):
            raise AssertionError(f"xc.load finds nothing, but verify does: {xc.verify(path)}") from error
        return "nothing"
    dcp.load(stock, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    report = xc.verify(path)
    assert report.ok, str(report)
    held = [state for state in _MASKS if _same(ours, whole(state, world)) and _same(stock, whole(state, world))]
    assert held, f"what was loaded is no state that was saved: {ours['note']}, by stock DCP: {stock['note']}"
    return held[0]


def _same(a, b):
    def bits(tensor):
        return tensor.reshape(-1).view(torch.uint8)

    return a["note"] == b["note"] and all(torch.equal(bits(a["model"][k]), bits(b["model"][k])) for k in b["model"])


def names(path):
    return set(os.listdir(path)) if Path(path).exists() else set()


def checkpoint_files(path):
    """The files that a checkpoint of ours consists of."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    data = {place.relative_path for place in metadata.storage_data.values()}
    return {".metadata", f"manifest-{metadata.storage_meta.save_id}.json", *data}


def save(state, path, world=1, rank=0):
    xc.save(part(state, world, rank), path, storage_writer=xc.ShardWriter(path, threads=THREADS))


def stock_save(state, path, world=1, **how):
    dcp.save(whole(state, world), storage_writer=dcp.FileSystemWriter(path, **how), no_dist=True)


# One process that saves


@dataclasses.dataclass(frozen=True)
class Case:
    """A save, and how it is struck.

    Args:
        old: what lies in the folder before: "nothing", "ours" (with litter of a save that broke off), what "stock" DCP
            saved, or what stock DCP saved for a single "rank" (use_collectives=False).
        world: how many processes save.
        how: see ``Blow``.
    """

    old: str
    world: int
    how: str


class Warned(logging.Handler):
    """What our loggers say."""

    def __init__(self):
        super().__init__()
        self.said = []
        logging.getLogger("torch_xla_ckpt").addHandler(self)

    def emit(self, record):
        self.said.append(record.getMessage())


def host(case, rank, blow, place):
    """Save the new state, struck; if this survives it, look at what is there and save the next."""
    path = place / "run" / "checkpoint"
    warned, audit = Warned(), Audit(path)
    if case.world > 1:
        coordination._PATIENCE = 0.5  # the survivor asks for the other rank so long
        rendezvous = f"file://{place}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=case.world, timeout=GLOO)
    own_blow = blow if blow is not None and blow.rank == rank else None
    files.os = Trap(place / f"notes-{rank}", own_blow, THREADS if case.world == 1 else 1)
    said = {"raised": None}
    try:
        save(NEW, path, case.world, rank)
    except BaseException as error:
        said["raised"] = f"{type(error).__name__}: {error}"
    said["warned"] = warned.said
    said["done"] = sorted(audit.seen)
    if case.how != "kill" and blow is not None:
        noted = len(read_notes(place / f"notes-{rank}"))
        _barrier(case)
        if rank == 0:
            said["names"] = sorted(names(path))
            said["loads"] = loads(path, case.world)
        _barrier(case)
        said["went on"] = len(read_notes(place / f"notes-{rank}")) - noted
        said["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("ShardWriter")]
        files.os = os
        save(NEXT, path, case.world, rank)
    (place / f"said-{rank}").write_text(json.dumps(said))


def _barrier(case):
    if case.world > 1:
        dist.barrier()


# One attempt


def attempt(case, blow, place):
    """One save, struck unless there is no blow."""
    faulthandler.dump_traceback_later(4 * HANGS, exit=True)
    path = place / "run" / "checkpoint"
    place.mkdir()
    if case.old != "nothing":
        shutil.copytree(place.parent / "old", path)
    before = names(path)
    exits = _run_hosts(case, blow, place)
    notes = [read_notes(place / f"notes-{rank}") for rank in range(case.world)]
    said = [json.loads(text.read_text()) if text.exists() else None for text in _texts(case, place)]
    if blow is None:
        succeeded(case, path, said, notes)
        nothing_escapes_the_trap(said, notes)
        all_is_stable_before_it_is_relied_on(notes)
    elif not any(map(blow.hits, notes[blow.rank])):
        # Which process finds the folder missing that both are about to make differs each time.
        assert case.world > 1 and blow.kind == "folder", f"it was never reached: {said}"
        succeeded(case, path, said, notes)
    elif case.how == "kill":
        killed(case, blow, path, exits, said, notes)
        xc.save(whole(NEXT, case.world), path)
        assert loads(path, case.world) == NEXT
    else:
        survived(case, blow, before, said, notes)
        assert loads(path, case.world) == NEXT
    assert names(path) == checkpoint_files(path), f"garbage: {sorted(names(path) - checkpoint_files(path))}"
    if blow is not None:
        shutil.rmtree(place)
    faulthandler.cancel_dump_traceback_later()


def _run_hosts(case, blow, place):
    """The processes' exit codes."""
    hosts = [FORK.Process(target=host, args=(case, rank, blow, place)) for rank in range(case.world)]
    try:
        for process in hosts:
            process.start()
        for rank, process in enumerate(hosts):
            process.join(HANGS)
            assert process.exitcode is not None, f"rank {rank} hangs"
    finally:
        for process in hosts:
            process.kill()
    return [process.exitcode for process in hosts]


def _texts(case, place):
    return [place / f"said-{rank}" for rank in range(case.world)]


def committed(notes):
    return any(str(note) == "after replace metadata" for note in notes[0])


def expected(case, notes):
    return NEW if committed(notes) else "nothing" if case.old == "nothing" else OLD


def succeeded(case, path, said, notes):
    assert [one and one["raised"] for one in said] == [None] * case.world
    assert loads(path, case.world) == expected(case, notes) == NEW


def killed(case, blow, path, exits, said, notes):
    """The old or the new checkpoint is there, whole, and the process that was not killed says that something failed."""
    assert exits[blow.rank] == -signal.SIGKILL, f"it was not killed: {said}"
    assert all(one and one["raised"] for rank, one in enumerate(said) if rank != blow.rank), f"nobody noticed: {said}"
    assert blow.rank == 0 or not committed(notes), "committed without the process that was killed"
    assert loads(path, case.world) == expected(case, notes)


def survived(case, blow, before, said, notes):
    assert all(said), "a process did not survive"
    assert said[0]["loads"] == expected(case, notes)
    assert not any(one["went on"] or one["threads"] for one in said), f"it goes on although it has failed: {said}"
    if case.how == "interrupt":
        assert {one["raised"] for one in said} == {"KeyboardInterrupt: "}, said
    else:
        everybody_knows(case, blow, said, notes)
        nothing_is_left(blow, before, set(said[0]["names"]), notes)


def everybody_knows(case, blow, said, notes):
    """An error is raised on every rank, with its cause; what goes wrong in clearing up is a warning."""
    reason = os.strerror(REFUSALS[blow.verb])
    if blow.verb == "unlink" and (committed(notes) or not said[0]["raised"]):
        assert not any(one["raised"] for one in said), f"it is saved, and raised {said}"
        assert any(reason in text for text in said[0]["warned"]), f"refused in silence: {said}"
        return
    where = f"rank {blow.rank}: " if case.world > 1 else ""
    for one in said:
        raised = one["raised"] or "nothing"
        assert raised.startswith("CheckpointError: ") and reason in raised and where in raised, raised


def nothing_is_left(blow, before, after, notes):
    """A save that failed has left no files of the process that failed, and has removed only litter."""
    if not committed(notes):
        others = {name for name in after if (match := re.match(r"__(\d+)_", name)) and int(match[1]) != blow.rank}
        assert after - before <= others, f"left behind: {sorted(after - before - others)}"
        assert before - after <= LITTER, f"removed: {sorted(before - after - LITTER)}"


def nothing_escapes_the_trap(said, notes):
    """Every file is created, renamed and removed where it is noted, so there is nothing that is never struck."""
    for one, own in zip(said, notes):
        done = [note.verb for note in own if note.moment == "after" and note.verb in Audit.EVENTS.values()]
        assert one["done"] == sorted(done), f"Python did {one['done']}, noted are {sorted(done)}"


def all_is_stable_before_it_is_relied_on(notes):
    """After a power failure there may be only what fsync has been called for; see that no more is needed."""
    for rank, own in enumerate(notes):
        done = [note for note in own if note.moment == "after"]
        verbs = [note.verb for note in done]
        folder_synced = [note.verb == "fsync" and note.kind == "folder" for note in done]
        commit = verbs.index("replace") if "replace" in verbs else len(done)
        for name in {note.name for note in done[:commit] if note.verb == "create" and note.kind != "lease"}:
            own_verbs = [note.verb for note in done[:commit] if note.name == name]
            assert own_verbs[-2:] == ["fsync", "close"], f"rank {rank}, {name}: {own_verbs}"
        last = max(n for n, note in enumerate(done) if note.verb == "create" and note.kind != "temporary")
        assert any(folder_synced[last:commit]), f"rank {rank}: names of new files may be lost at the commit"
        removal = verbs.index("unlink", commit) if "unlink" in verbs[commit:] else len(done)
        assert any(folder_synced[commit:removal]) or rank, "the commit may be lost after the old files"


# A case: one attempt for every operation


def prepare(case, path):
    """Lay down what is there before; each attempt gets a copy."""
    if case.old == "ours":
        xc.save(whole(OLD, case.world), path, storage_writer=xc.ShardWriter(path, threads=THREADS))
        for name in LITTER:
            (path / name).write_bytes(b"half of someth")
    elif case.old == "stock":
        stock_save(OLD, path, case.world)
    elif case.old == "rank":
        storage = dcp.FileSystemWriter(path)
        dcp.save(whole(OLD, case.world), storage_writer=storage, no_dist=True, use_collectives=False)


def blows(case, notes):
    """Every moment of every operation that an undisturbed save has noted."""
    for rank, own in enumerate(notes):
        for note in own:
            halves = ["during"] if note.verb == "write" and note.moment == "before" else []
            if case.how == "kill" and note.verb in ("open", "close"):
                moments = []  # neither changes a file, and what comes before and after them is struck
            elif case.how == "kill" and case.world == 1:
                moments = [note.moment, *halves]
            elif case.how == "kill":  # what comes after an operation comes before the next
                moments = [note.moment] if note.moment == "before" or note is own[-1] else []
            elif note.moment == "before":
                moments = halves if halves and case.how == "fail" else ["before"]
            else:
                moments = []
            for moment in moments:
                yield Blow(rank, note.verb, note.kind, note.number, moment, case.how)


def run(old, world, how, folder):
    """All attempts of a case; returns how many there were, what was struck, and what went wrong."""
    case, folder = Case(old, world, how), Path(folder)
    folder.mkdir()
    for state in _MASKS:
        whole(state, world)  # made once, for all that are forked
    undisturbed = folder / "undisturbed"
    with ProcessPoolExecutor(TOGETHER, FORK) as pool:
        pool.submit(prepare, case, folder / "old").result()
        pool.submit(attempt, case, None, undisturbed).result()
        notes = [read_notes(undisturbed / f"notes-{rank}") for rank in range(world)]
        todo = list(blows(case, notes))
        results = [pool.submit(attempt, case, blow, folder / str(number)) for number, blow in enumerate(todo)]
        errors = [(blow, result.exception()) for blow, result in zip(todo, results)]
    problems = [f"{blow}:\n{''.join(traceback.format_exception(error))}" for blow, error in errors if error]
    struck = sorted({f"{note.verb} {note.kind}" for own in notes for note in own})
    return {"attempts": len(todo), "struck": struck, "problems": problems}

"""A program that makes children at one stage of a save: ``python -m support.forking_program STAGE MODE FOLDER``.

It prints what went wrong as JSON.
"""

import faulthandler
import functools
import gc
import json
import logging
import multiprocessing
import os
import select
import signal
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import torch_xla_ckpt as xc
from torch_xla_ckpt.device.host import HostAccess

PATIENCE = 60  # seconds until a child counts as hanging
MAIN = os.getpid()
PARENT = types.SimpleNamespace(stager=None, manager=None, handle=None)
"""What children inherit."""


# What a child does


def lives(folder):
    """Use the package in a child as any program would, and find the parent's objects inert."""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.getsignal(signal.SIGTERM)
    assert gc.isenabled() and 0 < gc.get_threshold()[0] < 1 << 30
    own = Path(folder) / f"child-{os.getpid()}"
    saves_and_loads(own / "sync", lambda path: xc.save(state(7), path))
    with xc.SPMDStager("host") as stager:
        saves_and_loads(own / "async", lambda path: xc.async_save(state(7), path, stager=stager).result(PATIENCE))
        xc.async_save(state(8), own / "last", stager=stager)
    assert xc.verify(own / "last").ok
    if "torch_xla" not in sys.modules:  # whose runtime has no threads in a forked child
        with xc.CheckpointManager(own / "run", save_interval=1) as manager:
            assert callable(signal.getsignal(signal.SIGTERM))
            manager.save_async(1, state(1))
        assert manager.all_steps() == [1]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    is_inert()


def is_inert():
    """The parent's objects refuse to work in a forked child, and closing them does nothing."""
    if PARENT.stager is None:  # not forked
        return
    refused(lambda: xc.async_save(state(1), "/nowhere", stager=PARENT.stager))
    refused(PARENT.stager.wait)
    refused(lambda: PARENT.manager.save(99, state(1)))
    refused(lambda: PARENT.manager.save_async(99, state(1), force=True))
    refused(lambda: PARENT.manager.should_save(99))
    if PARENT.handle is not None:
        assert PARENT.handle.done()
        try:
            PARENT.handle.result()
        except xc.CheckpointError as error:
            assert "was forked from it" in str(error), error
    assert 0 in PARENT.manager.all_steps()
    PARENT.manager.plan_retention()
    PARENT.stager.close()
    PARENT.manager.close()


def refused(call):
    try:
        call()
    except xc.CheckpointError as error:
        assert "was forked from it" in str(error), error
    else:
        raise AssertionError("the child has used an object of its parent")


def state(n):
    return {"t": torch.full((50, 3), float(n)), "n": n}


def saves_and_loads(path, save):
    save(path)
    target = state(0)
    xc.load(target, path)
    assert target["n"] == 7 and target["t"].eq(7).all() and xc.verify(path).ok


# How children are made


def child_of_os_fork(folder, leave):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            lives(folder)
            code = 5
        except BaseException:
            traceback.print_exc()
        leave(code)
    exited(pid, 5)


def exited(pid, code):
    """Wait for a child, and show that it has exited with ``code``."""
    descriptor = os.pidfd_open(pid)
    in_time = select.select([descriptor], [], [], PATIENCE)[0]
    os.close(descriptor)
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert in_time and status == code, f"exit code {status}, expected {code}" if in_time else "the child hangs"


def left_by_sys_exit(folder):
    child_of_os_fork(folder, sys.exit)


def left_by_os_exit(folder):
    child_of_os_fork(folder, os._exit)


def process(folder, start="fork"):
    child = multiprocessing.get_context(start).Process(target=lives, args=(folder,))
    child.start()
    exited_process(child, 0)


def spawned(folder):
    process(folder, "spawn")


def forkserver(folder):
    process(folder, "forkserver")


def exited_process(child, code):
    child.join(PATIENCE)
    hangs = child.exitcode is None
    child.kill()
    child.join()
    assert not hangs, "the child hangs"
    assert child.exitcode == code, f"exit code {child.exitcode}, expected {code}"


def terminated(folder):
    """SIGTERM ends children, whether it comes at once or when they wait."""
    fork = multiprocessing.get_context("fork")
    for at_once in [True] * 10 + [False]:
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(target=waits, args=(sender,))
        child.start()
        assert at_once or receiver.poll(PATIENCE)
        child.terminate()
        exited_process(child, -signal.SIGTERM)


def waits(sender):
    sender.send("ready")
    while True:
        signal.pause()


def pool(folder):
    with multiprocessing.get_context("fork").Pool(2) as workers:
        assert workers.map(abs, range(-4, 0), chunksize=1) == [4, 3, 2, 1]
        workers.apply_async(signal.pause)  # leaving the block terminates whoever waits
    workers.join()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def data_loader(folder):
    for workers in (2, 4):
        loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=workers, multiprocessing_context="fork")
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


FORKS = (left_by_os_exit, process, terminated)
MORE_FORKS = (pool, data_loader, spawned, forkserver)


# When children are made


class Gate(xc.ShardWriter):
    """Storage that stops at one of its methods until it is let through, or calls ``act`` there."""

    def __init__(self, path, method, act=None):
        super().__init__(path)
        self.reached, self.opened = threading.Event(), threading.Event()
        self._method, self._act = method, act

    def _stop(self, method):
        if method == self._method and self._act is not None:
            self._act()
        elif method == self._method:
            self.reached.set()
            assert self.opened.wait(5 * PATIENCE)

    def prepare_local_plan(self, plan):
        self._stop("plan")
        return super().prepare_local_plan(plan)

    def write_data(self, plan, planner):
        self._stop("write")
        return super().write_data(plan, planner)

    def finish(self, metadata, results):
        self._stop("commit")
        super().finish(metadata, results)
        self._stop("clean up")


class Forking(HostAccess):
    """Makes children when a tensor is fetched."""

    def __init__(self, act):
        self._act = act

    def fetch(self, tensor, layout, part=0):
        act, self._act = self._act, lambda: None
        act()
        return super().fetch(tensor, layout, part)


def saved_in_background(stage, mode, path, make):
    """Make children at a stage of an async save."""
    stages = {"planning": "plan", "writing": "write", "committing": "commit", "cleaning up": "clean up"}
    started = on_devices(state(1)) if mode == "device" else state(1)
    access = Forking(lambda: make(left_by_sys_exit)) if stage == "copying" else None
    options = {} if access is None else {"access": lambda tensor: access}
    gate = Gate(path, stages.get(stage.removesuffix(", in its thread"), "write"))
    if stage.endswith(", in its thread"):
        gate._act = functools.partial(make, pool, data_loader)
    PARENT.stager = xc.SPMDStager(mode, **options)
    with PARENT.stager:
        if stage == "before":
            make(left_by_sys_exit, *MORE_FORKS)
        PARENT.handle = xc.async_save(started, storage_writer=gate, stager=PARENT.stager)
        if stage in stages:
            assert gate.reached.wait(PATIENCE)
            make(left_by_sys_exit, *(MORE_FORKS if stage == "writing" else ()))
        if stage == "waiting for a slot":
            waiting = When("waits for a free slot", make)
            second = threading.Thread(target=lambda: (waiting.reached.wait(), make(), gate.opened.set()))
            second.start()
            xc.async_save(state(2), path.with_name("second"), stager=PARENT.stager).result(PATIENCE)
            second.join()
        gate.opened.set()
        PARENT.handle.result(5 * PATIENCE)
        if stage == "committed":
            make(left_by_sys_exit)


class When(logging.Handler):
    """Notices a message."""

    def __init__(self, text, act):
        super().__init__()
        self.reached = threading.Event()
        self._text = text
        logging.getLogger("torch_xla_ckpt").addHandler(self)
        logging.getLogger("torch_xla_ckpt").setLevel(logging.INFO)

    def emit(self, record):
        if self._text in record.getMessage():
            self.reached.set()


def on_devices(host):
    from support.meshes import mesh, put

    return {**host, "t": put(host["t"], mesh((8,)), (None, None))}


def saved_here(stage, mode, path, make):
    """Make children in the middle of a synchronous save, in its own thread."""
    PARENT.stager = xc.SPMDStager("host")
    with PARENT.stager:
        if stage == "a save writes":
            xc.save(state(1), storage_writer=Gate(path, "write", lambda: make(left_by_sys_exit)))
        else:
            access = Forking(lambda: make(left_by_sys_exit))
            planner = xc.SPMDSavePlanner(access=lambda tensor: access)
            large = {**state(1), "large": torch.ones(1 << 20)}
            dcp.save(large, storage_writer=xc.ShardWriter(path), planner=planner, no_dist=True)


def main():
    stage, mode, folder = sys.argv[1:]
    faulthandler.dump_traceback_later(4 * PATIENCE, exit=True)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    path, problems, made = Path(folder) / "checkpoint", [], []

    def make(*more):
        for way in (*FORKS, *more):
            made.append(way.__name__)
            try:
                way(folder)
            except Exception:
                if os.getpid() != MAIN:
                    raise
                problems.append(f"{way.__name__}: {traceback.format_exc()}")

    run = saved_here if stage.startswith("a save ") else saved_in_background
    with xc.CheckpointManager(Path(folder) / "run", save_interval=1) as PARENT.manager:
        PARENT.manager.save(0, state(0))
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        run(stage, mode, path, make)
        assert signal.getsignal(signal.SIGTERM) is handler
        PARENT.manager.save_async(1, state(1))
    assert PARENT.manager.all_steps() == [0, 1]
    target = state(0)
    xc.load(target, path, unexpected="ignore")
    assert target["n"] == 1 and target["t"].eq(1).all() and xc.verify(path).ok
    assert gc.isenabled() and 0 < gc.get_threshold()[0] < 1 << 30 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    print(json.dumps({"problems": problems, "made": made}), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        if os.getpid() == MAIN:
            raise
        # A child of sys.exit has unwound the stack of the save that it was forked in.
        cause = error.failures[0][0] if isinstance(error, dcp.api.CheckpointException) else error
        os._exit(cause.code if isinstance(cause, SystemExit) else 1)

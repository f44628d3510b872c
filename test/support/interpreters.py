"""Python programs that start in milliseconds, and end as every Python program does.

Importing torch takes seconds in each process. So one process imports it, and forks once for each program. The forked
process leaves the server's loop and runs the program in its main module. Its interpreter ends like any other: it waits
for threads, calls ``atexit`` functions, and turns exceptions into an exit status. A process of ``multiprocessing``
does none of that (``support.programs`` is enough for programs that are killed).

A server that imports more modules is a fork of the one that imports fewer. Run as a script, this file is the first
server of a Python: ``python -m support.interpreters MODULE...``, with the modules to import. It runs on every torch.
"""

import atexit
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

if __name__ != "__main__":
    from support.paths import environment

STOCK = ("torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor")
HOST = (*STOCK, "torch_xla_ckpt")
XLA = (*HOST, "torch_xla", "torch_xla.distributed.spmd", "torch_xla.runtime")
SMALLER = {XLA: HOST, HOST: STOCK}


def run(arguments, *, env=None, modules=HOST, python=sys.executable, cwd=None, timeout=120):
    """Run a program to its end, as ``subprocess.run`` does that captures text.

    Args:
        arguments: what follows ``python`` on a command line: ``["-c", source, ...]``, ``["-m", module, ...]``, or a
            file and its arguments.
        env: environment variables besides those of ``environment()``. Of those that the interpreter or torch read at
            the start, only ``PYTHONPATH`` has an effect.
        modules: what is imported before the program starts: ``STOCK``, ``HOST`` or ``XLA``.
        python: the Python that runs the program; default: this one.
        cwd: the program's working directory; default: this process's.
        timeout: seconds until a hanging program is killed, and ``subprocess.TimeoutExpired`` is raised.
    """
    program = Program(arguments, env=env, modules=modules, python=python, cwd=cwd)
    output, errors = program.communicate(timeout=timeout)
    return subprocess.CompletedProcess(arguments, program.returncode, output, errors)


class Program:
    """A running program, with what tests use of ``subprocess.Popen``. Its arguments are those of ``run``."""

    def __init__(self, arguments, *, env=None, modules=HOST, python=sys.executable, cwd=None):
        self._arguments = arguments
        self.returncode = None
        (self.stdin, self.stdout, self.stderr, self._status), theirs = _pipes()
        request = {
            "arguments": list(map(str, arguments)),
            "environment": {**environment(), **(env or {})},
            "cwd": str(cwd or os.getcwd()),
        }
        try:
            _server(python, modules).send(request, theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.pid = int(self._status.readline())

    def communicate(self, input=None, timeout=None):
        """Return what the program prints until its end, on standard output and as errors."""
        if input is not None:
            self.stdin.write(input)
        self.stdin.close()
        deadline = time.monotonic() + (timeout or 1000)
        printed = {}
        threads = [
            threading.Thread(target=lambda pipe=pipe: printed.update({pipe: pipe.read()}), daemon=True)
            for pipe in (self.stdout, self.stderr)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.kill()
                raise subprocess.TimeoutExpired(self._arguments, timeout, str(printed))
        self.wait(max(1.0, deadline - time.monotonic()))
        return printed[self.stdout], printed[self.stderr]

    def wait(self, timeout=None):
        """Return the exit status, which is negative if a signal ended the program."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._arguments, timeout)
            self.returncode = int(self._status.readline())
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)


def _pipes():
    """Return the test's and the program's ends of pipes for stdin, stdout, stderr, and the process's status."""
    (their_in, our_in), *outward = (os.pipe() for _ in range(4))
    ours = [os.fdopen(our_in, "w"), *(os.fdopen(reading, "r") for reading, _ in outward)]
    return ours, [their_in, *(writing for _, writing in outward)]


class _Server:
    def __init__(self, python, modules):
        self._socket, theirs = socket.socketpair()
        with theirs:
            if modules in SMALLER:
                _server(python, SMALLER[modules]).send({"modules": modules}, [theirs.fileno()])
            else:
                # One thread of each library: forking would lose the others.
                env = environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PYTHONWARNINGS="ignore")
                process = subprocess.Popen([python, "-m", "support.interpreters", *modules], env=env, stdin=theirs)
                atexit.register(process.wait)
        atexit.register(self._socket.close)

    def send(self, request, descriptors):
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)


@functools.cache
def _server(python, modules):
    return _Server(python, modules)


def _next_program(modules):
    """Fork for every request, and return in the forked process: its arguments. The server itself exits here."""
    for module in modules:
        importlib.import_module(module)
    own = os.environ["PYTHONPATH"].split(os.pathsep)
    path = [entry for entry in sys.path[1:] if entry not in own]
    requests = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the monitors
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            request = json.loads(message)
            requests.close()
            if "modules" in request:  # become the server that imports more
                requests = socket.socket(fileno=descriptors.pop())
                for module in request["modules"]:
                    importlib.import_module(module)
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                _become(request, descriptors, path)
                return request["arguments"]
            _monitor(pid, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _monitor(pid, descriptors):
    """Tell the test the program's number, wait for the program, tell its exit status, and exit."""
    *pipes, status = descriptors
    for descriptor in pipes:
        os.close(descriptor)
    os.write(status, f"{pid}\n".encode())
    os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


def _become(request, descriptors, path):
    """Take the pipes, the environment, the working directory and the import path of a program."""
    *pipes, status = descriptors
    os.close(status)
    for number, descriptor in enumerate(pipes):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The old streams remember whether the server's files can seek.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    first = request["arguments"][0]
    folder = "" if first == "-c" else os.getcwd() if first == "-m" else os.path.dirname(os.path.abspath(first))
    sys.path[:] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    import runpy

    arguments = _next_program(sys.argv[1:])
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")

"""Programs for tests that need several processes: they start in milliseconds and can be killed.

Importing torch and torch_xla takes several seconds in each process. So one process imports both and then only forks
(``multiprocessing``'s fork server). It never uses a device: every forked program sets up torch_xla's runtime itself.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import time

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        *("moto.server", "boto3", "s3fs", "torch_xla", "torch_xla.distributed.spmd", "torch_xla.runtime"),
        *("torch_xla_ckpt", "torch.distributed.checkpoint._fsspec_filesystem", "pytest"),
    ]
)


class Program:
    """A forked process with the methods of ``subprocess.Popen`` that tests use.

    Args:
        function: called in the process; an importable function, or one of a module that is.
        arguments: for the function; they are pickled.
        output: file for what the process prints.
        errors: file for its standard error; default: the same file.
        environment: variables that are added to the fork server's environment.
    """

    def __init__(self, function, arguments, output, errors=None, environment=None):
        self._process = PROCESSES.Process(
            target=_main,
            args=(function, arguments, str(output), str(errors or output), environment or {}, list(sys.path)),
            daemon=True,
        )
        self._process.start()

    def wait(self, timeout=None):
        """Return the exit status, which is negative if a signal ended the process.

        Raises:
            TimeoutError: the process runs longer than ``timeout`` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self._process.pid} did not end within {timeout} s")
        return self._process.exitcode

    def poll(self):
        """Return the exit status; None while the process runs."""
        return self._process.exitcode

    @property
    def pid(self):
        return self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def send_signal(self, number):
        os.kill(self._process.pid, number)


def wait_for_all(programs, timeout):
    """Wait for programs for ``timeout`` seconds together, kill those that still run, and return the exit statuses."""
    deadline = time.monotonic() + timeout
    try:
        for program in programs:
            program.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for program in programs:
            program.kill()
    return [program.wait() for program in programs]


def _main(function, arguments, output, errors, environment, path):
    for number, file in ((1, output), (2, errors)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    sys.path[:] = path
    function(*arguments)
    atexit._run_exitfuncs()

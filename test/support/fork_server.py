"""A process that imports torch and then only forks, so that a process to be killed costs milliseconds.

Run as a script, it reads lines that each name a function and its arguments, and calls it in a process of its own.
"""

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from support.paths import environment

LIMIT = 150  # seconds for one call


class ForkServer:
    def __init__(self, folder):
        self._said = Path(folder) / "fork_server.txt"
        # One thread of each library: forking would lose the others.
        env = environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        pipe = subprocess.PIPE
        with open(self._said, "w") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.fork_server"], env=env, stdin=pipe, stdout=pipe, stderr=said, text=True
            )

    def call(self, function, *args):
        """Call ``module.function``; returns its result, which is JSON, and the reason if it skips itself."""
        print(json.dumps([function, args], default=str), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"raised": "the fork server has died"}')
        assert "raised" not in answer, self._said.read_text()[-5000:] + answer["raised"]
        return answer["returned"], answer["skipped"]

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(timeout=LIMIT)
        finally:
            self._process.kill()


def main():
    import torch

    from support import crash_points  # noqa: F401  so that it is there in all that is forked

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed is no answer
    for line in sys.stdin:
        print(json.dumps(_forked(*json.loads(line))), file=answers, flush=True)


def _forked(function, args):
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_called, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(LIMIT) else {"raised": f"{function}{args} hangs"}
    except EOFError:
        return {"raised": f"{function}{args} has died"}
    finally:
        process.join(1)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)


def _called(sender, function, args):
    import pytest

    os.setpgid(0, 0)  # what hangs is killed with all that it has started
    module, _, name = function.rpartition(".")
    try:
        sender.send({"returned": getattr(importlib.import_module(module), name)(*args), "skipped": None})
    except pytest.skip.Exception as reason:
        sender.send({"returned": None, "skipped": str(reason)})
    except BaseException:
        sender.send({"raised": traceback.format_exc()})


if __name__ == "__main__":
    main()

"""How far the memory of this process rises while a test's program works. Reads /proc, so Linux only."""

import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace


def anonymous():
    """Memory of this process in MiB, without maps of files."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


@contextmanager
def watched():
    """Watch the block. What it yields has ``peak`` and ``remains`` afterwards: MiB above the start."""
    found = SimpleNamespace()
    start, peak, done = anonymous(), 0, threading.Event()

    def sample():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield found
    finally:
        done.set()
        sampler.join()
        found.peak, found.remains = peak - start, anonymous() - start
